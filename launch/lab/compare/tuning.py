"""Tuning in a comparison: each entry by itself is trained with every value of a grid and one seed, and the runs of the
other seeds take the values of its lowest validation loss. All that is known is read from the tuning runs, which lie in
COMPARISON/<entry>/<variant>/tune/optimizer.lr=0.003/seed-0."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from matmix.data.artifacts import read_json_lines
from matmix.launch.lab.compare.config import TUNING, Comparison, Entry, Point, Value, entries_of, folder_name
from matmix.launch.many import runs
from matmix.launch.many.planned import PlannedRun, check_directories, of_seed, other_settings
from matmix.launch.many.scores import markdown
from matmix.model.build import count_parameters
from matmix.train.config import RunConfig
from matmix.train.guards.steps import DIVERGED
from matmix.train.recipe import config_from_dict, config_to_dict, merged, nested
from matmix.train.run.outcome import outcomes_folder

FURTHER = 6
"""Values beyond each end of a grid that are tried at most."""


# -- which values are tried -------------------------------------------------------------------------------------------


def wanted(grid: Mapping[str, Sequence[Value]], tried: Mapping[Point, float]) -> list[Point]:
    """Returns what is to be tried next: the product of the grid's values; then, for every key whose value in the best
    point is at an end of those tried beside it, one value further, at the ratio of its two lowest; [] = tuned.

    Keys with a single value, or with values that are no numbers above 0, do not go on.
    """
    if missing := [point for point in _product(grid) if point not in tried]:
        return missing
    best = lowest(tried)
    further = []
    for axis, (key, values) in enumerate(grid.items()):
        value = _beyond(values, best[axis][1], _beside(tried, best, axis), {point[axis][1] for point in tried})
        if value is not None:
            further.append((*best[:axis], (key, value), *best[axis + 1 :]))
    return further


def lowest(tried: Mapping[Point, float]) -> Point:
    """Returns the point of the lowest loss; of equal ones, as of runs that all diverged, the one of lowest values."""

    def place(point: Point) -> tuple[float, ...]:
        return tried[point], *(value if isinstance(value, int | float) else 0.0 for _, value in point)

    return min(tried, key=place)


def _product(grid: Mapping[str, Sequence[Value]]) -> list[Point]:
    return list(itertools.product(*([(key, value) for value in values] for key, values in grid.items())))


def _beside(tried: Mapping[Point, float], best: Point, axis: int) -> list[Any]:
    """Returns the values of a key in the points that differ from the best one in no other key."""
    same = best[:axis] + best[axis + 1 :]
    return [point[axis][1] for point in tried if point[:axis] + point[axis + 1 :] == same]


def _is_at_end(values: Sequence[Value], best: Any, beside: Sequence[Any]) -> bool:
    """Returns True where the best value of a key whose values can go on has no tried one on one of its sides."""
    numbers = len(values) > 1 and all(type(value) in (int, float) and value > 0 for value in values)
    return numbers and not min(beside) < best < max(beside)


def _beyond(values: Sequence[Any], best: Any, beside: Sequence[Any], tried: Set[Any]) -> float | int | None:
    """Returns the value that follows the best one where the grid goes on. tried: the key's values in all points."""
    if not _is_at_end(values, best, beside):
        return None
    is_up, (low, second) = best == max(beside), sorted(values)[:2]
    if sum(value > max(values) if is_up else value < min(values) for value in tried) >= FURTHER:
        return None
    value = best * second / low if is_up else best * low / second
    value = round(value) if all(type(value) is int for value in values) else float(f"{value:.3g}")
    return None if value in beside or not value else value


# -- what is known of them --------------------------------------------------------------------------------------------


def tuned(comparison: Comparison) -> Comparison:
    """Returns the comparison with what the tuning runs say: what each entry has tried, and in the config of one that is
    tuned the values chosen. Raises ValueError (one line) for values of the grid that an entry cannot have."""
    if not comparison.settings.tune:
        return comparison
    return dataclasses.replace(comparison, entries=tuple(_tuned(comparison, entry) for entry in comparison.entries))


def _tuned(comparison: Comparison, entry: Entry) -> Entry:
    grid, tried = comparison.settings.tune, {}
    first = set(_product(grid))
    while points := wanted(grid, tried):
        losses = {}
        for point in points:
            try:
                known = entry.tried.get(point)
                losses[point] = _loss(_task(comparison, entry, point)) if known is None else known
            except ValueError:  # the grid has gone on to a value that cannot be
                if point in first:
                    raise
        tried |= losses
        if not losses or None in losses.values():
            break
    best = None if None in tried.values() else lowest(tried)
    if best is None or math.isinf(tried[best]):
        return dataclasses.replace(entry, tried=tried, chosen=())
    return dataclasses.replace(entry, tried=tried, chosen=best, config=with_values(entry, best))


def with_values(entry: Entry, point: Point) -> RunConfig:
    """Returns the config of an entry with these values of what is tuned. Raises ValueError (one line) for values that
    it cannot have."""
    where = f'entry "{entry.title}" with {_words(point)} of comparison.tune'
    config = config_from_dict(merged(config_to_dict(entry.config), nested(dict(point))), where)
    if config.model != entry.config.model and count_parameters(config.model) != entry.parameters:
        raise ValueError(f"{where} has another number of parameters: what changes it is an entry of its own")
    return config


def _words(point: Point) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point)


def _task(comparison: Comparison, entry: Entry, point: Point) -> PlannedRun:
    names = (f"{key}={folder_name(value) if isinstance(value, str) else value}" for key, value in point)
    folder, seed = comparison.home / entry.folder / TUNING / ",".join(names), comparison.settings.tuned_with
    config = of_seed(with_values(entry, point), seed, folder)
    return PlannedRun(entry=f"{entry.title}, {_words(point)}", seed=seed, config=config)


def _loss(task: PlannedRun) -> float | None:
    """Returns the last validation loss of a tuning run, infinite where it diverged; None where it is not finished."""
    if other_settings(task):
        return None
    if task.is_finished():
        loss = task.run.read_summary()["validation"].get("loss")
        return math.inf if loss is None or math.isnan(loss) else loss
    return math.inf if _has_diverged(task) else None


def _has_diverged(task: PlannedRun) -> bool:
    """Returns True where the newest start of a run ended because its loss was no number."""
    ends = [end for path in outcomes_folder(task.run.path).glob("*.json") for end in read_json_lines(path)]
    newest = max(ends, key=lambda end: end.get("time", 0.0), default={})
    return DIVERGED in str(newest.get("reason"))


# -- the tuning runs --------------------------------------------------------------------------------------------------


def tuning_tasks(comparison: Comparison, only: Sequence[str] = (), *, every: bool = False) -> list[PlannedRun]:
    """Lists the tuning runs that are known to be needed and not finished; comparison: as `tuned` returns it. every:
    lists those that are finished too."""
    tried = [(entry, point, loss) for entry in entries_of(comparison, only) for point, loss in entry.tried.items()]
    return [_task(comparison, entry, point) for entry, point, loss in tried if every or loss is None]


def tune(comparison: Comparison, only: Sequence[str], parallel: int) -> tuple[Comparison, runs.Ended]:
    """Trains what tunes the entries, round by round, as `run_tasks` does; returns the comparison as it is tuned then.
    Divergence is a result; after any other failure of a run, or an end before its last step, its entry is not tuned."""
    ended, unfinished = runs.Ended([], stopped=False), set()
    while not ended.stopped:
        tasks = [task for task in tuning_tasks(comparison, only) if task.run.path not in unfinished]
        if not tasks:
            break
        check_directories(tasks)
        now = runs.run_tasks(tasks, parallel)
        failures = [failure for failure in now.failures if not _has_diverged(failure.task)]
        unfinished |= {task.run.path for task in tasks if _loss(task) is None}
        ended, comparison = ended.then(runs.Ended(failures, now.stopped)), tuned(comparison)
    return comparison, ended


# -- what is said of them ---------------------------------------------------------------------------------------------


def plan_words(comparison: Comparison) -> list[str]:
    """Says in a plan what is tuned; [] where nothing is."""
    grid, seed = comparison.settings.tune, comparison.settings.tuned_with
    if not grid:
        return []
    lists = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in grid.items())
    count = comparison.settings.grid_size * len(comparison.entries)
    further = f"and more where the best value is at an end, up to {FURTHER} beyond it"
    return [f"before them each entry is tuned by itself with seed {seed}, {lists}: {count:,} runs, {further}"]


def advice(comparison: Comparison) -> str:
    """Says what can be done about a run that was trained with other settings."""
    tuned = "; where a wider grid chose another value for it, delete it" if comparison.settings.tune else ""
    return f" (--report leaves this run out{tuned})"


def why_not_tuned(comparison: Comparison, entry: Entry) -> str:
    """Says of an entry that is not ready why it is not."""
    waiting = [point for point, loss in entry.tried.items() if loss is None]
    if not waiting:
        return "diverged at all values that were tried"
    others = next(filter(None, (other_settings(_task(comparison, entry, point)) for point in waiting)), "")
    return f"tuned with other settings: {others}" if others else "not tuned yet"


def tuning_table(comparison: Comparison) -> str:
    """Tabulates for each entry the values that were chosen and all that were tried; "" where nothing is tuned."""
    grid, seed = comparison.settings.tune, comparison.settings.tuned_with
    rows, has_variants = [], len({entry.variant for entry in comparison.entries}) > 1
    for entry in comparison.entries:
        open_yet = "not yet" if None in entry.tried.values() else "none"  # all diverged
        cells = [f"{value}" for _, value in entry.chosen] or [open_yet] * len(grid)
        for axis, values in enumerate(grid.values() if entry.chosen else ()):
            if _is_at_end(values, entry.chosen[axis][1], _beside(entry.tried, entry.chosen, axis)):
                cells[axis] += " (at an end)"
        tried = [f"{_at(point)}: {_loss_words(loss)}" for point, loss in sorted(entry.tried.items())]
        label = f"{entry.label}, {entry.variant}" if has_variants else entry.label
        rows.append([label, *cells, ", ".join(tried)])
    return markdown(["entry", *grid, f"validation loss with seed {seed} at"], rows) if grid else ""


def _at(point: Point) -> str:
    return " and ".join(f"{value}" for _, value in point)


def _loss_words(loss: float | None) -> str:
    return "not finished" if loss is None else f"{loss:.4f}" if math.isfinite(loss) else "diverged"
