"""The gated RMSNorm as an op: checks, backend choice, registration with PyTorch."""

import torch
from torch import Tensor

from matmix.kernels.checks import check_floating, check_shape
from matmix.kernels.gated_norm.chunked import GATED_NORM, NormInputs
from matmix.kernels.registration import register


def gated_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Returns rmsnorm(x) * weight * silu(gate): normalised first, then gated.

    Args:
        x: (..., d).
        weight: (d,).
        gate: shaped like x.
        eps: added to the mean square.
        group_size: channels that share a root mean square, a divisor of d; None for all of them.
        backend: "auto", "torch" or "triton".

    Returns:
        Shaped and typed like x; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "gated_norm"
    check_floating(op, x=x, weight=weight, gate=gate)
    if x.dim() < 2 or 0 in x.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., d), none of them 0")
    check_shape(op, "weight", weight, x.shape[-1:])
    check_shape(op, "gate", gate, tuple(x.shape))
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"{op}: group_size is {group_size}; use a divisor of the width {x.shape[-1]}")
    return _gated_norm(NormInputs(x, weight, gate, eps, group_size), backend).y


# Operations per element. Convention: one for each addition, multiplication, division and exponential; what is done
# once per group (the root) is left out, and so is what only one backend does (reading twice, padding).
FORWARD_FLOPS = 2 + 2 + 3 + 2
"""Squares and their sum; scale and weight; the gate's sigmoid (exp, add, divide); gate times that, product."""
BACKWARD_FLOPS = 3 + 3 + 3 + 2 + 2 + 3 + 7
"""Normed x again; sigmoid; dy gate sigmoid weight; weight's sums; sums along the group; dx; dgate."""


_gated_norm = register(
    GATED_NORM, "gated_norm.fused", lambda given, _: torch.empty_like(given.x, memory_format=torch.contiguous_format),
    flops=lambda given, backward: (BACKWARD_FLOPS if backward else FORWARD_FLOPS) * given.x.numel(),
)  # fmt: skip
