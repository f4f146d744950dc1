"""The common part of all importers: what other projects call the parameters and options of a model.

A layout says which of our models a foreign configuration describes, and the foreign name of each of our parameters. No
parameter is fused or split: a checkpoint is loaded by renaming only, and the same names hold for gradients.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of one foreign model: `names` our parameter -> theirs; `ignored` their tensors that carry no
    weight."""

    kind: str
    names: dict[str, str]
    ignored: frozenset[str] = field(default_factory=frozenset)


class ForeignConfig:
    """A foreign configuration, whose values may be typed or their text ("True", "64", "['mru', 'mlp']")."""

    def __init__(self, kind: str, values: Mapping[str, Any]):
        self.kind = kind
        self.values = dict(values)
        self.used: set[str] = set()

    def get(self, name: str, default: Any, like: type | None = None) -> Any:
        """The value of `name`, or `default` if absent or None; ValueError if it is not of the type of the
        default."""
        self.used.add(name)
        value = literal(self.values.get(name))
        if value is None:
            return default
        like = like or type(default)
        if like is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if like is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, like) or (like is int and isinstance(value, bool)):
            raise ValueError(f"{self.kind}: {name} = {value!r} should be of type {like.__name__}")
        return value

    def require(self, name: str, like: type) -> Any:
        """The value of `name`; ValueError if it is missing."""
        value = self.get(name, None, like)
        if value is None:
            raise ValueError(f"{self.kind}: the configuration lacks {name}")
        return value

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """ValueError for a name that neither was used nor is `known`, with the nearest one."""
        for name in self.values:
            if name not in self.used and name not in known:
                near = difflib.get_close_matches(name, sorted(self.used | known), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{self.kind}: unknown configuration key {name!r}{hint}")


def literal(value: Any) -> Any:
    """The Python value that a text stands for, or the text itself; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value.replace("inf", "1e999") if value.startswith(("(", "[", "inf")) else value)
    except (ValueError, SyntaxError):
        return value


def shape_text(tensor: torch.Tensor) -> str:
    """A shape as text: (64, 3)."""
    return f"({', '.join(map(str, tensor.shape))})"


def rename_state(
    layout: Layout, expected: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Our name -> their tensor.

    Args: expected: our parameters by name (on any device, meta too), for their shapes.
    Raises: ValueError, one line, for a missing key, an unexpected one or a shape that differs.
    """
    assert set(layout.names) == set(expected), set(layout.names) ^ set(expected)
    renamed = {}
    for ours, theirs in layout.names.items():
        if theirs not in state:
            raise ValueError(f"{layout.kind}: the state lacks key {theirs!r} of shape {shape_text(expected[ours])}")
        if state[theirs].shape != expected[ours].shape:
            raise ValueError(
                f"{layout.kind}: key {theirs!r} has shape {shape_text(state[theirs])}, "
                f"but the configuration gives {shape_text(expected[ours])}"
            )
        renamed[ours] = state[theirs]
    unexpected = [name for name in state if name not in layout.ignored and name not in set(layout.names.values())]
    if unexpected:
        first = unexpected[0]
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise ValueError(
            f"{layout.kind}: key {first!r} of shape {shape_text(state[first])} has no place in the "
            f"model that the configuration gives{more}"
        )
    return renamed


def is_tied(layout_kind: str, state: Mapping[str, torch.Tensor], output: str, embedding: str) -> bool:
    """Returns True where the output projection is the embedding: it is missing in the checkpoint, or equal to the
    embedding."""
    if output not in state or embedding not in state:
        return True
    if state[output].shape != state[embedding].shape:
        raise ValueError(
            f"{layout_kind}: keys {output!r} {shape_text(state[output])} and {embedding!r} "
            f"{shape_text(state[embedding])} should have one shape"
        )
    return bool(torch.equal(state[output], state[embedding]))
