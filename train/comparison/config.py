"""Recipes of comparisons: an ordinary recipe, and a table `[comparison]` with the entries that are compared.

    [comparison]
    seeds = [0, 1]
    [[comparison.entry]]
    name = "Toeplitz, data-dependent"
    model.layers = ["toeplitz_dd"]

An entry is the recipe with the keys that stand beside its name; what the command line gives goes to all entries.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matmix.data.remote import is_url
from matmix.train.arguments import parse_arguments, unknown_key
from matmix.train.config import RunConfig
from matmix.train.recipe import config_from_dict, config_to_dict, differences, find_recipe, read_toml

# What each run of a comparison is given; and what lies beside the entries' folders.
_NOT_AN_ENTRYS = {"seed": "comparison.seeds gives the seeds", "run_dir": "every run has a folder of its own"}
_TAKEN_FOLDERS = ("report", "launch", "logs")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EntryConfig:
    """One of the models that are compared."""

    name: str
    """What the table calls it; also the name of its folder, with - for what is not a letter, digit or one of . _ +"""
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All other keys of the table: what it has in place of the recipe's values, nested as in the recipe."""

    def __post_init__(self) -> None:
        _require(bool(self.folder), f"comparison.entry: name = {self.name!r} holds no letter or digit for a folder")
        _require(
            self.folder.lower() not in _TAKEN_FOLDERS,
            f'comparison.entry: the name "{self.name}" is taken by a folder of the comparison itself; use another',
        )
        for key, reason in _NOT_AN_ENTRYS.items():
            _require(key not in self.overrides, f'comparison.entry "{self.name}" sets {key}: {reason}')

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9._+]+", "-", self.name).strip("-.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonConfig:
    """The table `[comparison]`."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Every entry is trained once with each of them; a seed decides weights, order of the data and masking."""
    parameters: int = 0
    """Parameters that every entry shall have in all, embeddings included; 0 = those of the first entry at the recipe's
    own width."""
    tolerance: float = 0.01
    """Share of them by which an entry may be off."""
    entry: tuple[EntryConfig, ...] = ()
    """What is compared."""

    def __post_init__(self) -> None:
        _require(
            bool(self.seeds) and all(type(seed) is int and seed >= 0 for seed in self.seeds),
            f"comparison.seeds should be a list of integers >= 0, got {list(self.seeds)}",
        )
        _require(len(set(self.seeds)) == len(self.seeds), f"comparison.seeds has a seed twice: {list(self.seeds)}")
        _require(
            type(self.parameters) is int and self.parameters >= 0,
            f"comparison.parameters should be an integer >= 0, got {self.parameters!r}",
        )
        _require(
            isinstance(self.tolerance, int | float) and 0 < self.tolerance < 1,
            f"comparison.tolerance should be a number between 0 and 1, got {self.tolerance!r}",
        )
        _require(bool(self.entry), "comparison.entry is empty: give a table [[comparison.entry]] for each model")
        folders = [entry.folder.lower() for entry in self.entry]
        for entry in self.entry:
            _require(
                folders.count(entry.folder.lower()) == 1,
                f'comparison.entry: two entries would share the folder "{entry.folder}"; give them other names',
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry with its whole config."""

    name: str
    folder: str
    config: RunConfig
    """Of its runs, but for seed and run directory."""
    parameters: int = 0
    """Of its model; 0 until widths are matched."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `matmix compare` works on."""

    home: Path
    settings: ComparisonConfig
    entries: tuple[Entry, ...]
    target: int = 0
    """Parameters that every entry has, within the tolerance; 0 until widths are matched."""


def read_comparison(recipe: str, overrides: Sequence[str] = ()) -> Comparison:
    """A comparison from a recipe (path or bundled name) and overrides for all entries, such as ``--steps 100``.

    Raises FileNotFoundError for a missing recipe and ValueError (one line) for what is wrong in it.
    """
    path = find_recipe(recipe)
    values = read_toml(path)
    if "comparison" not in values:
        raise ValueError(f"{path} has no table [comparison]: it is a plain recipe, for matmix train")
    settings = _settings(values.pop("comparison"), str(path))
    for key in ("seed",):
        _require(key not in values, f"{path} sets {key}: {_NOT_AN_ENTRYS[key]}")
    tables = {entry.name: _merged(values, entry.overrides) for entry in settings.entry}
    configs = {name: _entry_config(table, name, str(path)) for name, table in tables.items()}
    if overrides:
        given = _given(overrides, next(iter(configs.values())))
        _require(("seed",) not in given, f"--seed: {_NOT_AN_ENTRYS['seed']}")
        for key, value in given.items():
            for table in tables.values():
                _put(table, key, value)
        configs = {name: _entry_config(table, name, "command line") for name, table in tables.items()}
    run_dir = next(iter(configs.values())).run_dir or f"runs/{path.stem}"
    _require(not is_url(run_dir), f"--run-dir {run_dir}: a comparison lies in a folder of this machine")
    return Comparison(
        home=Path(run_dir),
        settings=settings,
        entries=tuple(
            Entry(name=entry.name, folder=entry.folder, config=configs[entry.name]) for entry in settings.entry
        ),
    )


def differing_keys(entries: Sequence[Entry]) -> list[str]:
    """Keys outside of `[model]` in which entries differ: with any of them they are not trained alike."""
    first, *others = (entry.config for entry in entries)
    found = {key for other in others for key, _, _ in differences(first, other)}
    return sorted(key for key in found if not key.startswith("model."))


def _settings(table: Any, where: str) -> ComparisonConfig:
    _require(isinstance(table, dict), f"{where}: [comparison] is a table, got {table!r}")
    for key in table:
        if key not in {field.name for field in dataclasses.fields(ComparisonConfig)}:
            raise unknown_key(key, ComparisonConfig, f"{where}: [comparison]")
    rows, seeds = table.get("entry", []), table.get("seeds", [0, 1, 2])
    _require(
        isinstance(rows, list) and all(isinstance(row, dict) for row in rows),
        f"{where}: comparison.entry should be tables [[comparison.entry]], got {rows!r}",
    )
    _require(isinstance(seeds, list), f"{where}: comparison.seeds should be a list of integers, got {seeds!r}")
    try:
        entries = []
        for number, row in enumerate(rows, 1):
            name = row.pop("name", None)
            _require(isinstance(name, str), f"comparison.entry number {number} has no name, which should be a string")
            entries.append(EntryConfig(name=name, overrides=row))
        return ComparisonConfig(**{**table, "seeds": tuple(seeds), "entry": tuple(entries)})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _entry_config(table: dict[str, Any], name: str, where: str) -> RunConfig:
    return config_from_dict(table, f'{where}: entry "{name}"')


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(values))
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else copy.deepcopy(value)
    return merged


def _given(overrides: Sequence[str], default: RunConfig) -> dict[tuple[str, ...], Any]:
    """What the command line names: path of the key -> its value, checked."""
    values = config_to_dict(parse_arguments(RunConfig, list(overrides), default=default, prog="matmix compare RECIPE"))
    found = {}
    for word in overrides:
        if word.startswith("--"):
            path = tuple(word[2:].split("=", 1)[0].replace("-", "_").split("."))
            value: Any = values
            for part in path:
                value = value[part]
            found[path] = value
    return found


def _put(table: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = copy.deepcopy(value)
