"""Reads foreign configurations, and renames weights: what all importers share.

No parameter is fused or split: a checkpoint is loaded by renaming only, and the same names hold for gradients.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A module of this project that a foreign configuration describes, and the names of its parameters there."""

    kind: str
    bases: tuple[type[nn.Module], ...]
    """Its class, after classes that change what it does."""
    arguments: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    """Beginnings of our names -> theirs. The longest one counts; what has none bears the same name there."""
    ignored: Collection[str] = ()
    """Their tensors that carry no weight."""

    @classmethod
    def of_layer(
        cls, kind: str, bases: tuple[type, ...], d_model: int, config: Any, max_seqlen: int = 0, **more: Any
    ) -> Layout:
        """Returns the layout of a mixer. Raises ValueError (one line) for options that do not fit."""
        bases[-1].check(d_model, config)
        arguments = {"d_model": d_model, "config": config, "causal": False, "max_seqlen": max_seqlen}
        return cls(kind=kind, bases=bases, arguments={**arguments, "output_std": 0.02}, **more)

    def theirs(self, name: str) -> str:
        """Returns what our parameter `name` is called there."""
        begin = max((ours for ours in self.names if f"{name}.".startswith(f"{ours}.")), key=len, default="")
        return self.names.get(begin, "") + name[len(begin) :]

    def renamed(self, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns their tensors by our names; a scalar has one entry here. expected: our parameters, for their shapes.
        Raises ValueError (one line) for a missing key, an unexpected one or a shape that differs."""
        renamed, left = {}, {name: tensor for name, tensor in state.items() if name not in self.ignored}
        for ours, parameter in expected.items():
            name = self.theirs(ours)
            if name not in state:
                raise ValueError(f"{self.kind}: the state lacks key {name!r} of shape {shape_text(parameter)}")
            tensor = state[name] if state[name].dim() else state[name].reshape(1)
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"{self.kind}: key {name!r} has shape {shape_text(state[name])}, but the configuration gives "
                    f"{shape_text(parameter)}"
                )
            renamed[ours] = tensor
            left.pop(name, None)
        if left:
            name, tensor = next(iter(left.items()))
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ValueError(
                f"{self.kind}: key {name!r} of shape {shape_text(tensor)} has no place in the model that the "
                f"configuration gives{more}"
            )
        return renamed


class ForeignConfig:
    """A foreign configuration, whose values may be typed or their text ("True", "64", "['mru', 'mlp']"). Errors are
    ValueErrors of one line."""

    def __init__(self, kind: str, values: Mapping[str, Any]):
        self.kind, self.values = kind, dict(values)
        self.used: set[str] = set()

    def get(self, name: str, default: Any, like: type | None = None) -> Any:
        """Returns the value of `name`, of the type of the default, or `default` if it is absent or None."""
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
        """Returns the value of `name`, which must be there."""
        value = self.get(name, None, like)
        if value is None:
            raise ValueError(f"{self.kind}: the configuration lacks {name}")
        return value

    def choice(self, name: str, default: str, known: Collection[str]) -> str:
        """Returns the value of `name`, one of `known`."""
        value = self.get(name, default)
        if value not in known:
            raise ValueError(f"{self.kind}: {name} = {value!r}; can be read: {', '.join(known)}")
        return value

    def options(self, kind: type, *names: str) -> dict[str, Any]:
        """Returns fields of a dataclass of ours, which have the same names and defaults there."""
        return {name: self.get(name, kind.__dataclass_fields__[name].default) for name in names}

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Refuses a name that neither was used nor is `known`, and tells the nearest one."""
        for name in self.values:
            if name not in self.used and name not in known:
                near = difflib.get_close_matches(name, sorted(self.used.union(known)), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{self.kind}: unknown configuration key {name!r}{hint}")


def literal(value: Any) -> Any:
    """Returns the Python value that a text stands for, or the text itself; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value.replace("inf", "1e999") if value.startswith(("(", "[", "inf")) else value)
    except (ValueError, SyntaxError):
        return value


def shape_text(tensor: Tensor) -> str:
    """Writes a shape as text: (64, 3)."""
    return f"({', '.join(map(str, tensor.shape))})"


def is_tied(kind: str, state: Mapping[str, Tensor], output: str, embedding: str) -> bool:
    """Says whether the output projection is the embedding: it is missing in the checkpoint, or equal."""
    if output not in state or embedding not in state:
        return True
    if state[output].shape != state[embedding].shape:
        raise ValueError(
            f"{kind}: keys {output!r} {shape_text(state[output])} and {embedding!r} {shape_text(state[embedding])} "
            "should have one shape"
        )
    return torch.equal(state[output], state[embedding])
