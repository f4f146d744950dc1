"""The sizes of a ladder, from the table `[ladder]` or the command line: every entry of a comparison at each of them,
with the depth, the width and the steps that it has there. A size is a variant of the comparison, so that runs lie in
LADDER/<entry>/<size>/seed-0."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import errors_in_one_line
from matmix.launch.lab.compare.config import LADDER, Comparison, Entry, read_comparison
from matmix.launch.lab.compare.width import matched, with_facts
from matmix.model.build import build_model, parameters_of
from matmix.model.config import ModelConfig
from matmix.train.arguments import given_keys, read_table
from matmix.train.config import RunConfig
from matmix.train.errors import require

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_OWN_KEYS = {
    "steps": "tokens in proportion to the parameters give the steps (--tokens-per-parameter)",
    "epochs": "tokens in proportion to the parameters give the steps (--tokens-per-parameter)",
    "comparison.parameters": "--sizes gives the parameters",
}
"""What a ladder decides, and so cannot be given."""
_SET_TOKENS = "steps", "epochs", "global_batch_size", "data.seqlen"
_LENGTHS = "warmup", "decay", "steps"
"""Of the schedule: steps, or shares of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LadderConfig:
    """The table `[ladder]`."""

    sizes: str = ""
    """Parameters without embeddings, as in "0.5M,1M,2M"."""
    tokens_per_parameter: float = 20.0
    """Training tokens for each of them."""
    tune_sizes: int = 1
    """So many of the smallest sizes are tuned; larger ones take their rates from the last of these, by muP."""

    def __post_init__(self) -> None:
        require(bool(self.sizes), "sizes are missing: give --sizes 0.5M,1M,2M,4M")
        counts = list(map(_parameters, self.sizes.split(",")))
        require(len(set(counts)) == len(counts), f"sizes = {self.sizes} names a size twice")
        some = self.tokens_per_parameter > 0 and math.isfinite(self.tokens_per_parameter)
        require(some, f"tokens_per_parameter should be a number above 0, got {self.tokens_per_parameter}")
        require(self.tune_sizes >= 1, f"tune_sizes should be 1 or more, got {self.tune_sizes}")

    @property
    def counts(self) -> dict[str, int]:
        """Name of each size -> its parameters, the smallest first."""
        counts = sorted(map(_parameters, self.sizes.split(",")))
        return {f"{count / 1e6:g}M": count for count in counts}

    def tokens(self, size: str) -> float:
        """Returns the tokens that models of a size are trained on."""
        return self.tokens_per_parameter * self.counts[size]

    def named(self, words: Sequence[str]) -> list[str]:
        """Returns names of entries and of sizes, of the latter as `counts` has them however they are written: 264k is
        0.264M."""
        names = {count: name for name, count in self.counts.items()}
        return [names.get(_count(word), word) for word in words]


def _count(text: str) -> int:
    """Returns the number that a text such as 0.5M or 60k says; 0 where it says none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)([kMG]?)", text.strip())
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def _parameters(text: str) -> int:
    count = _count(text)
    require(count > 0, f"sizes: {text.strip()!r} is no number of parameters such as 0.5M or 60k")
    return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """Describes what `matmix ladder` works on."""

    comparison: Comparison
    """With a variant for each size, the smallest first."""
    settings: LadderConfig
    parameters: Mapping[str, int]
    """Title of each entry -> its parameters without embeddings: N in the law."""


@errors_in_one_line()
def read_ladder(recipe: str, overrides: Sequence[str], given: Mapping[str, Any], only: Sequence[str] = ()) -> Ladder:
    """A ladder from the recipe of a comparison (path or bundled name) or its own folder, overrides for all entries, and
    values that go over its table [ladder]. only: names of entries and of sizes; other entries are left out at sizes
    that they have no width for. Raises FileNotFoundError for a missing recipe or data set, and ValueError (one line)
    for what is wrong in it and for entries that have no width at a size."""
    keys = given_keys(overrides)
    for key, reason in _OWN_KEYS.items():
        require(key not in keys, f"--{key}: {reason}")
    comparison = read_comparison(recipe, overrides, runs=Path("runs", LADDER))
    table = {**comparison.recipe.get(LADDER, {}), **given}
    settings = read_table(LadderConfig, table, "[ladder]")
    first = comparison.entries[0].config
    variants = f"{recipe} has variants, and the variants of a ladder are its sizes: take a recipe without them"
    require(not comparison.settings.variant, variants)
    require(
        first.task().unit == "tokens", f"{recipe}: a ladder counts tokens, of which {first.objective.name} has none"
    )
    for key, values in comparison.settings.tune.items():
        require(key not in _SET_TOKENS, f"comparison.tune has {key}: all entries of a size read as many tokens")
        lengths = key in [f"schedule.{name}" for name in _LENGTHS] and any(value >= 1 for value in values)
        require(not lengths, f"comparison.tune has {key} in steps, which are others at each size: give shares, below 1")
    own = tuple(with_facts(comparison.entries))
    ratios = {size: (count / _parameters_at(own[0].config.model)) ** (1 / 3) for size, count in settings.counts.items()}
    entries = (_at_size(entry, size, ratio, settings) for size, ratio in ratios.items() for entry in own)
    kept = {**comparison.recipe, LADDER: table}
    comparison = dataclasses.replace(comparison, entries=tuple(entries), recipe=kept)
    # A rate may come from another size than the one that is asked for, so that an entry is asked for at all.
    named = [word for word in settings.named(only) if word not in settings.counts]
    comparison = matched(comparison, settings.counts, named)
    parameters = {entry.title: _parameters_at(entry.config.model) for entry in comparison.entries}
    return Ladder(comparison=comparison, settings=settings, parameters=parameters)


def _parameters_at(model: ModelConfig) -> int:
    return parameters_of(build_model(model, device="meta"), embeddings=False)


def _at_size(entry: Entry, size: str, ratio: float, settings: LadderConfig) -> Entry:
    """Returns an entry as it is at a size but for its width. A layer has about as many parameters as the square of its
    width, so that depth and width both grow with the third root of the parameters, `ratio`."""
    config = entry.config
    cycle = len(config.model.layers)
    layers = cycle * max(1, round(ratio * config.model.n_layers / cycle))
    tokens = config.global_batch_size * config.task().units(config.data.seqlen)
    steps = math.ceil(settings.tokens(size) / tokens)
    model = dataclasses.replace(config.model, n_layers=layers)
    config = _with_steps(dataclasses.replace(config, model=model), steps)
    return dataclasses.replace(entry, folder=f"{entry.folder}/{size}", variant=size, config=config)


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    """Returns a config with so many steps, of which warm-up and decay have the share that they have in the recipe."""
    schedule, own = config.schedule, config.steps
    lengths = {key: getattr(schedule, key) for key in _LENGTHS}
    scaled = {key: round(value * steps / own) for key, value in lengths.items() if value >= 1}
    schedule = dataclasses.replace(schedule, **{key: max(1, value) for key, value in scaled.items()})
    return dataclasses.replace(config, steps=steps, epochs=0.0, schedule=schedule)
