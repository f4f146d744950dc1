"""Says what the layouts of checkpoints mean, by what they call the engine that wrote them. Without torch, for lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTS: dict[str, tuple[str, ...]] = {"torch": (), "deepspeed": ("zero_stage",), "portable": ()}
"""Kind of engine -> the numbers that only its layouts have."""


def title(layout: Mapping[str, Any]) -> str:
    """Returns what lists call a checkpoint with this layout."""
    return f"{layout['engine']}, ZeRO-{layout['zero_stage']}" if "zero_stage" in layout else layout["engine"]
