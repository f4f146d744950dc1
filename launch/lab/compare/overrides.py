"""What the command line gives to a comparison: values that are put into its recipe before any config is built of it.

So an override may also repair what the recipe alone would not allow; all checks see the recipe as it is then.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from matmix.train.arguments import field_names, key_types, parse_arguments, unknown_key
from matmix.train.config import RunConfig
from matmix.train.recipe import plain

Path = tuple[str, ...]
_SETTINGS: dict[str, Any] = {"seeds": tuple[int, ...], "parameters": int, "tolerance": float, "controls": bool}
PREFIX = "--comparison."


def given_values(words: Sequence[str]) -> dict[Path, Any]:
    """Path of each key that is given -> its value, of the right type. Raises ValueError (one line)."""
    paths = list(dict.fromkeys(_path(word) for word in words if word.startswith("--")))
    if not words:
        return {}
    values = dataclasses.asdict(
        parse_arguments(_only_given(paths), list(words), prog="matmix compare RECIPE")  # type: ignore[type-var]
    )
    return {path: plain(functools.reduce(operator.getitem, path, values)) for path in paths}


def put(table: dict[str, Any], path: Path, value: Any) -> None:
    """Sets a key of nested tables."""
    for part in path[:-1]:
        if not isinstance(table.get(part), dict):  # what else is there is refused by whoever reads it
            table[part] = {}
        table = table[part]
    table[path[-1]] = copy.deepcopy(value)


def remove(table: dict[str, Any], path: Path) -> None:
    """Removes a key of nested tables, if it is there."""
    for part in path[:-1]:
        table = table.get(part, {})
        if not isinstance(table, dict):
            return
    table.pop(path[-1], None)


def _path(word: str) -> Path:
    key = word[2:].split("=", 1)[0].replace("-", "_")
    if word.startswith(PREFIX):
        name = key.removeprefix("comparison.")
        if name not in _SETTINGS:
            raise ValueError(f"--{key}: of [comparison], {', '.join(_SETTINGS)} can be given; the rest is the recipe's")
    elif key not in field_names(RunConfig):
        raise unknown_key(key, RunConfig, "command line")
    return tuple(key.split("."))


def _only_given(paths: Sequence[Path]) -> type:
    """A config class that has these keys only, so that their values are read without checks of what they go with."""
    hints = {**typing.get_type_hints(RunConfig), "comparison": _SETTINGS}
    return _table("Given", hints, paths)


def _table(name: str, hints: Mapping[str, Any], paths: Sequence[Path]) -> type:
    fields = []
    for key in dict.fromkeys(path[0] for path in paths):
        hint, inner = hints[key], [path[1:] for path in paths if path[0] == key]
        if isinstance(hint, Mapping) or dataclasses.is_dataclass(hint):
            if () in inner:
                raise ValueError(f"command line: {key} is a table; give its keys one by one, as in --{key}.KEY VALUE")
            hint = _table(key, hint if isinstance(hint, Mapping) else key_types(hint), inner)
        fields.append((key, hint))
    return dataclasses.make_dataclass(name, fields, frozen=True, kw_only=True)
