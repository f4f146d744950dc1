"""The results of a ladder, read from its runs: the losses of each entry by size, the laws fitted to them, and how much
less each entry's loss is than those of the controls."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import linregress

from matmix.launch.lab.compare.config import Entry, tasks_of
from matmix.launch.lab.compare.report import EntryResult, Part, collect
from matmix.launch.lab.ladder.law import Fit, fit_law
from matmix.launch.lab.ladder.sizes import Ladder
from matmix.launch.many.planned import on_other_data

LEAST_SLOPE_POINTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """An entry at a size."""

    entry: Entry
    parameters: int
    """Without embeddings."""
    result: EntryResult

    @property
    def losses(self) -> dict[int, float]:
        """Seed -> validation loss, of the finished runs whose loss is a number."""
        values = {run.seed: run.values.get("loss", [math.nan])[0] for run in self.result.runs}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """An entry at all sizes, the smallest first."""

    rungs: Mapping[str, Rung]
    """By the name of the size."""

    @property
    def entry(self) -> Entry:
        return next(iter(self.rungs.values())).entry

    @property
    def name(self) -> str:
        return self.entry.name

    @functools.cached_property
    def points(self) -> list[tuple[int, float]]:
        """(parameters, loss) of each finished run."""
        return [(rung.parameters, loss) for rung in self.rungs.values() for loss in rung.losses.values()]

    def loss_at(self, parameters: int, size: str, seed: int) -> float:
        """Returns the loss at a size and with a seed, as it would be with other parameters there: along the slope of
        the losses with this seed over the logarithm of N, where there are several sizes."""
        there = {name: rung for name, rung in self.rungs.items() if seed in rung.losses}
        rung = there[size]
        if len(there) == 1:
            return rung.losses[seed]
        logs = np.log([one.parameters for one in there.values()])
        losses, order = [one.losses[seed] for one in there.values()], min(2, len(there) - 1)
        slope = np.gradient(losses, logs, edge_order=order)[list(there).index(size)]
        return float(rung.losses[seed] + slope * math.log(parameters / rung.parameters))

    @functools.cached_property
    def fit(self) -> Fit | None:
        """Its law; None where `why_no_law` says why."""
        try:
            return fit_law(*zip(*self.points, strict=True)) if self.points else None
        except ValueError:
            return None

    @functools.cached_property
    def why_no_law(self) -> str:
        """Returns one line, "" where there is a law."""
        if self.fit is not None:
            return ""
        try:
            fit_law([parameters for parameters, _ in self.points], [loss for _, loss in self.points])
        except ValueError as error:
            return str(error)
        raise AssertionError("points without a law are refused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """How much less the loss of an entry is than that of a control, by size: positive where the entry is better."""

    entry: Entry
    control: Entry
    differences: Mapping[str, list[float]]
    """Name of the size -> loss of the control, at the entry's N, minus that of the entry, of each seed that both have
    finished. Their own N differ by up to twice the tolerance, which may be as much as what is to be seen."""
    parameters: Mapping[str, int]

    @functools.cached_property
    def slope(self) -> tuple[float, float] | None:
        """Returns by how much it grows with ten times the parameters, by least squares over the means of the sizes, and
        the standard error of that; None with fewer than three sizes. Seeds of one size share its depth and width, so
        that they are no further sizes."""
        means = [(self.parameters[size], np.mean(values)) for size, values in self.differences.items() if values]
        if len(means) < LEAST_SLOPE_POINTS:
            return None
        found = linregress(np.log10([parameters for parameters, _ in means]), [value for _, value in means])
        return float(found.slope), float(found.stderr)


def families_of(ladder: Ladder) -> tuple[list[Part], list[Family]]:
    """Reads all runs: what `collect` says of each size, and the entries, in the order of the recipe, controls last."""
    others = on_other_data(tasks_of(ladder.comparison))
    parts = [collect(part, others) for part in ladder.comparison.by_variant()]
    by_title = {result.entry.title: result for part in parts for result in part.results}
    families: dict[str, dict[str, Rung]] = {}
    for entry in ladder.comparison.entries:
        rung = Rung(entry=entry, parameters=ladder.parameters[entry.title], result=by_title[entry.title])
        families.setdefault(entry.name, {})[entry.variant] = rung
    return parts, sorted((Family(rungs=rungs) for rungs in families.values()), key=lambda one: bool(one.entry.control))


def gaps_of(families: Sequence[Family], counts: Mapping[str, int]) -> list[Gap]:
    """Returns the gaps of every entry to every control, those to one control beside each other."""
    gaps = []
    for control in (family for family in families if family.entry.control):
        for family in (family for family in families if not family.entry.control):
            differences = {}
            for size, rung in family.rungs.items():
                both = [seed for seed in rung.losses if seed in control.rungs[size].losses]
                theirs = {seed: control.loss_at(rung.parameters, size, seed) for seed in both}
                differences[size] = [theirs[seed] - rung.losses[seed] for seed in both]
            gaps.append(Gap(entry=family.entry, control=control.entry, differences=differences, parameters=counts))
    return gaps
