"""Parts of a run that a recipe names: one of ours by its name, or one of your own as "my_package.module:Name"."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TypeVar

Part = TypeVar("Part")


def find_part(name: str, known: Mapping[str, Part], kind: str) -> Part:
    """Returns what `name` stands for: an entry of `known`, or an attribute of a module that Python can import.

    kind: what it is for errors, such as "optimizer". Importing runs code, so only names from a recipe or the command
    line come here, never names from a dataset or somebody else's checkpoint. Raises ValueError (one line) if there is
    no such entry, module or attribute.
    """
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
