"""From the cells of a label column to numbers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


def as_list(cell: Any, separator: str | None = None) -> list[Any]:
    """The items of a cell: of a list, or of a text by `separator` (None = white space)."""
    if isinstance(cell, list | tuple):
        return list(cell)
    return [item.strip() for item in str(cell).split(separator) if item.strip()]


def name_of(value: Any) -> str:
    """A class as text, however the file has it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class Classes:
    """Names of classes in the order of the model's outputs."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def found(cls, values: Iterable[Any]) -> Classes:
        """The classes among the labels of the training examples: sorted, numbers by their size."""
        names = {name_of(value) for value in values}
        return cls(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any, where: Callable[[], str]) -> int:
        """Raises ValueError (one line) for a class that there is not."""
        name = name_of(value)
        if (number := self._numbers.get(name)) is None:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(self.names[:20])}"
            raise ValueError(
                f'{where()}: label "{name}" is not among the {len(self)} classes of the training examples; {hint}'
            )
        return number


def read_number(value: Any, where: str) -> float:
    """A value to predict. Raises ValueError (one line) for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(f"{where}: label {value!r} is not a number")
    return number
