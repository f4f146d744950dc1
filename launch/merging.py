"""What joining the parts of a preparation asks of the command line, for texts and pictures alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from matmix.data.storage.remote import is_url


def check_merge(out: str, options: Mapping[str, Any], config: type, *, usage: str, may_be_given: str) -> None:
    """Raises ValueError (one line) without an output folder, or where options are given that the parts have already.

    config: dataclass with the options' defaults; may_be_given: the one option that a merge takes.
    """
    if not out:
        raise ValueError(f"no output folder given: {usage}")
    standard = {field.name: field.default for field in dataclasses.fields(config)}
    for name, value in options.items():
        if value != standard[name] and name != may_be_given:
            flag = name.replace("_", "-")
            raise ValueError(f"the parts were made with options of their own, leave --{flag} out: {usage}")
    if is_url(out):
        raise ValueError(f"parts are joined in the folder where they were made, not at a URL such as {out}")
