"""Checks of options that a dataclass declares with a list of allowed values."""

import functools
import typing
from typing import Any, Literal


def check_words(options: Any, place: str) -> None:
    """Raises ValueError (one line) for a field of the type `Literal` with another value than its type allows. place:
    what stands before the names of the fields, such as "model."."""
    for name, known in _words_of(type(options)).items():
        if (value := getattr(options, name)) not in known:
            raise ValueError(f"{place}{name} = {value!r}; known: {', '.join(map(str, known))}")


@functools.cache
def _words_of(kind: type) -> dict[str, tuple]:
    """Returns the values that each field of the type `Literal` may have. Types are evaluated from their text: once."""
    hints = typing.get_type_hints(kind).items()
    return {name: typing.get_args(hint) for name, hint in hints if typing.get_origin(hint) is Literal}
