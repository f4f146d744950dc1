"""The options of a scan, and the inputs and outputs of its forward and backward passes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LARGEST_LOG_DECAY = 0.01
"""Bound of a log-decay per token: states may grow this fast and no faster, so that no product inside a chunk
overflows.
"""


class ScanForm(NamedTuple):
    """How the directions of a scan read and how their outputs are combined."""

    shift: bool = False
    """Each direction's output moves one token on in its own sense (Hydra): tokens do not meet themselves."""
    combine: str = "add"
    """Two directions: "add", "mult" (elementwise product) or "concat" (forward | backward along headdim)."""
    self_term: str = "sum"
    """Two directions without shift: a token's own terms count in full in each ("sum") or half ("mean")."""
    normalize: bool = False
    """Divide each row by its sum of mixer weights plus `eps`; "add" only, without initial states."""
    eps: float = 1e-6


class ScanSide(NamedTuple):
    """One direction of a scan: q, k (batch, seqlen, ngroups, d_state), the rest as in `semiseparable_scan`."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None
    initial_state: Tensor | None
    reverse: bool


class SideGradients(NamedTuple):
    """Gradients of the tensors of a `ScanSide`, with their shapes and dtypes; None for tensors that were not given."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None
    initial_state: Tensor | None


class ScanOutput(NamedTuple):
    """The outputs of the forward pass of a scan."""

    y: Tensor
    """(batch, seqlen, nheads, headdim), 2 * headdim wide for "concat"; already normalised if asked for."""
    row_sum: Tensor | None
    """(batch, seqlen, nheads) float32 sums of the mixer's rows, without eps; only with `normalize`."""
    final: Tensor | None
    """The state after the last token, float32; only if asked for, one direction only."""
    rest: Tensor | None = None
    """What rounding to half precision took off a normalised y, in the same dtype. The gradient of a normalised row is
    a difference to the row's own mean, y, whose rounding would count in all of its entries alike."""
