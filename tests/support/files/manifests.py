"""Changes of a data set's manifest, for tests that hand one in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def set_value(*keys_and_value: Any) -> Callable[[Any], None]:
    """A change that puts the last argument where the keys before it lead."""
    *keys, last, value = keys_and_value

    def change(manifest: Any) -> None:
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value

    return change
