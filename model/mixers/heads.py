"""Options that mixers with heads of their own number share: `headdim`, and `nheads` with 0 for d_model / headdim."""

from __future__ import annotations

from typing import Any


def head_count(d_model: int, config: Any) -> int:
    """The number of heads."""
    return config.nheads or d_model // config.headdim


def check_heads(mixer: str, d_model: int, config: Any) -> None:
    """Raise a one-line ValueError where heads do not fit the width. mixer: its name in a configuration."""
    for name, least in (("headdim", 1), ("nheads", 0)):
        if getattr(config, name) < least:
            raise ValueError(f"model.mixers.{mixer}.{name} = {getattr(config, name)}: must be {least} or more")
    if config.nheads == 0 and d_model % config.headdim:
        raise ValueError(
            f"model.mixers.{mixer}.headdim = {config.headdim} does not divide d_model = {d_model}; "
            "change headdim, or give nheads"
        )
