"""Sweeps: one run for each combination of values, in a directory with a name a person can read."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.train.arguments import field_names, inline
from matmix.train.recipe_files import read_toml

Words = tuple[str, ...]
"""A value as on the command line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    name: str  # of its directory below the sweep's
    overrides: Words  # as on the command line


def parse_sweep(axes: Sequence[str], file: str | None = None) -> list[Point]:
    """Returns the runs of a sweep in a fixed order, the last axis fastest; [] where nothing is swept. axes:
    KEY=VALUE,VALUE each; file: TOML with a list of tables `[[run]]` of overrides, and optionally `name`. Raises
    ValueError for what cannot be read, and for two runs that would have the same name."""
    if not axes and not file:
        return []
    rows = _read_rows(Path(file)) if file else [("", {})]
    values = [_axis(axis) for axis in axes]
    keys = [key for key, _ in values]
    if len(set(keys)) < len(keys):
        raise ValueError(f"--sweep: {max(keys, key=keys.count)} is given twice; name all its values in one list")
    points = []
    for (given, row), choice in itertools.product(rows, itertools.product(*(chosen for _, chosen in values))):
        swept = dict(zip(keys, choice, strict=True))
        overrides = {**row, **swept}
        name = ",".join(filter(None, [given, _readable(swept)])) if given else _readable(overrides)
        name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", name).strip("-.")[:200] or "run"
        words = (word for key, value in overrides.items() for word in (f"--{key}", *value))
        points.append(Point(name, tuple(words)))
    names = [point.name for point in points]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f'--sweep: two runs would share the directory "{doubled}"; give them a name in the file')
    return points


def _axis(text: str) -> tuple[str, list[Words]]:
    key, equals, values = text.partition("=")
    if "{" in values:
        raise ValueError(f"--sweep: {text} has a table: write it into a file of tables [[run]], for --sweep-file")
    chosen = [tuple(value.split()) for value in values.split(",")]
    if not equals or not key.strip("- ") or not all(chosen):
        raise ValueError(f"--sweep takes KEY=VALUE,VALUE such as optimizer.lr=1e-3,3e-4, got {text!r}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"--sweep: {text} names a value twice")
    return key.strip("- ").replace("-", "_"), chosen


def _read_rows(path: Path) -> list[tuple[str, dict[str, Words]]]:
    """Reads the name, or "", and the overrides of each run."""
    if not path.is_file():
        raise FileNotFoundError(f"sweep file not found: {path}")
    content = read_toml(path)
    rows = content.get("run")
    if set(content) != {"run"} or not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: a sweep is a list of tables [[run]] and nothing else")
    from matmix.train.config import RunConfig  # with torch, for which no --help waits

    known = field_names(RunConfig)
    names = [row.pop("name", "") for row in rows]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ValueError(f"{path}: name should be a string, got {wrong[0]!r}")
    return list(zip(names, (_flatten(row, known) for row in rows), strict=True))


def _flatten(table: dict[str, Any], known: Sequence[str], prefix: str = "") -> dict[str, Words]:
    """Returns the words of each option; known: the dotted keys of a config."""
    flat: dict[str, Words] = {}
    for key, value in table.items():
        if isinstance(value, dict) and any(name.startswith(f"{prefix}{key}.") for name in known):
            flat |= _flatten(value, known, f"{prefix}{key}.")
        else:
            values = value if isinstance(value, list) else [value]
            flat[prefix + key] = tuple(inline(one) if isinstance(one, dict) else str(one) for one in values)
    return flat


def _readable(overrides: dict[str, Words]) -> str:
    """Writes lr=1e-3,layers=mru: last words of the keys, as many as it takes to tell them apart."""
    names = {}
    for key in overrides:
        words = key.split(".")
        endings = (".".join(words[-count:]) for count in range(1, len(words)))
        alone = (short for short in endings if sum(f".{other}".endswith(f".{short}") for other in overrides) == 1)
        names[key] = next(alone, key)
    return ",".join(f"{names[key]}={' '.join(words)}" for key, words in overrides.items())
