"""Parts of a run that a recipe names: one of ours by its name, or one of your own as "my_package.module:Name"."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

import dacite

from matmix.train.arguments import DACITE, field_names, unknown_key

Part = TypeVar("Part")


def find_part(name: str, known: Mapping[str, Part], kind: str, base: type | None = None) -> Part:
    """Returns what `name` stands for: an entry of `known`, or an attribute of a module that Python can import.

    kind: what it is for errors, such as "optimizer". base: the class that it must be a subclass of. Importing runs
    code, so only names from a recipe or the command line come here, never names from a dataset or somebody else's
    checkpoint. Raises ValueError (one line) if there is no such entry, module, attribute or subclass.
    """
    part = _look_up(name, known, kind)
    if base is not None and not (isinstance(part, type) and issubclass(part, base)):
        public = f"{base.__module__.removesuffix('.base')}.{base.__name__}"
        raise ValueError(f"{kind} {name!r} is not a subclass of {public}")
    return part


def _look_up(name: str, known: Mapping[str, Part], kind: str) -> Part:
    module, separator, attribute = name.partition(":")
    if not separator:
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        there = f"there are {', '.join(known)}; " if known else ""
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {kind} {name!r}{hint} ({there}your own: 'package.module:Name')")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"{kind} {name!r}: Python cannot import {module} ({error}); is it on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"{kind} {name!r}: {module} has no {attribute}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """For parts that take no options."""


def read_options(values: Mapping[str, Any], cls: type[Part], where: str) -> Part:
    """Reads the options of a part from a recipe's table as the dataclass `cls`.

    where: the table, for errors. Raises ValueError (one line) for a key that `cls` does not have, a value of another
    type, or one without a default that is missing.
    """
    for key in values:
        if not (known := field_names(cls)):
            raise ValueError(f'{where}: unknown key "{key}": there are no options')
        if key not in known:
            raise unknown_key(key, cls, where)
    try:
        return dacite.from_dict(cls, dict(values), DACITE)
    except dacite.DaciteError as error:
        raise ValueError(f"{where}: {error}") from None
