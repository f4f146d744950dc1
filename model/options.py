"""Checks of options that a dataclass declares with a list of allowed values."""

import typing
from typing import Any, Literal


def check_words(options: Any, place: str) -> None:
    """Raises ValueError (one line) for a field of the type `Literal` with another value than its type allows. place:
    what stands before the names of the fields, such as "model."."""
    for name, kind in typing.get_type_hints(type(options)).items():
        known, value = typing.get_args(kind), getattr(options, name)
        if typing.get_origin(kind) is Literal and value not in known:
            raise ValueError(f"{place}{name} = {value!r}; known: {', '.join(map(str, known))}")
