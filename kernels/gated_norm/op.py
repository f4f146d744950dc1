"""The gated RMSNorm as an op: checks, backend choice, registration with PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.backend import Forms, check_backend
from matmix.kernels.checks import check_floating, check_shape
from matmix.kernels.gated_norm.chunked import norm_backward, norm_forward
from matmix.kernels.registration import Output, register


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
    check_backend(op, backend, x)
    return _gated_norm(Inputs(x, weight, gate, eps, group_size, backend)).y


class Inputs(NamedTuple):
    """The arguments of matmix::gated_norm."""

    x: Tensor
    weight: Tensor
    gate: Tensor
    eps: float
    group_size: int | None
    backend: str


FORMS = Forms("gated_norm", "gated_norm.fused", norm_forward, norm_backward)


def _forward(given: Inputs) -> Output:
    return Output(FORMS.choose("forward", given.backend, given.x)(*given[:5]))


def _backward(given: Inputs, _: Output, cotangents: Output) -> dict[str, Tensor]:
    dx, dweight, dgate = FORMS.choose("backward", given.backend, given.x)(cotangents.y, *given[:5])
    return {"x": dx, "weight": dweight, "gate": dgate}


def _like(given: Inputs) -> Output:
    return Output(torch.empty_like(given.x, memory_format=torch.contiguous_format))


# Operations per element. Convention: one for each addition, multiplication, division and exponential; what is done
# once per group (the root) is left out, and so is what only one backend does (reading twice, padding).
FORWARD_FLOPS = 2 + 2 + 3 + 2
"""Squares and their sum; scale and weight; the gate's sigmoid (exp, add, divide); gate times that, product."""
BACKWARD_FLOPS = 3 + 3 + 3 + 2 + 2 + 3 + 7
"""Normed x again; sigmoid; dy gate sigmoid weight; weight's sums; sums along the group; dx; dgate."""


def _flops(given: Inputs, *, backward: bool) -> int:
    return (BACKWARD_FLOPS if backward else FORWARD_FLOPS) * given.x.numel()


_gated_norm = register("gated_norm", _forward, _like, Inputs, Output, backward=_backward, flops=_flops)
