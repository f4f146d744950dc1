"""The selective scan of Mamba-1 as an op: checks, registration with PyTorch. Its PyTorch form is the mixer's own."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.backend import check_backend, takes_triton, tell_fallback
from matmix.kernels.checks import check_cu_seqlens, check_finite, check_floating, check_shape
from matmix.kernels.functions import Operation
from matmix.kernels.registration import register

WIDEST = 128
"""The most states of a channel that the kernels take."""


class ScanInputs(NamedTuple):
    """The arguments of `s6_scan`."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    rates: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class ScanOutputs(NamedTuple):
    """Its results."""

    y: Tensor
    state: Tensor


def s6_scan_is_fused(x: Tensor, d_state: int, backend: str = "auto") -> bool:
    """Returns whether `s6_scan` can run on inputs like x, with so many states per channel."""
    why_not = _no_kernel(d_state)
    tell_fallback("s6_scan", backend, x, why_not)
    return not why_not and takes_triton(backend, x)


def s6_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The selective scan of Mamba-1 (arXiv 2312.00752, section 3.2), in Triton kernels alone: h_t = exp(dt_t A) h_{t-1}
    + dt_t x_t B_t, y_t = h_t . C_t for every channel. The mixer `s6` has a form in PyTorch.

    Args:
        x: (batch, seqlen, channels).
        dt: (batch, seqlen, channels), step sizes, float32 where bfloat16 would round decays to 1.
        b, c: (batch, seqlen, N), shared by all channels; N is at most 128.
        rates: (channels, N), A, not positive.
        initial_state: (batch or documents, channels, N), zeros if None.
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1).

    Returns:
        y (batch, seqlen, channels) and the last states (batch or documents, channels, N), float32.

    Raises:
        ValueError: a shape, dtype or device does not fit, or the kernels cannot run here (`s6_scan_is_fused`).
    """
    op = "s6_scan"
    tensors = {"x": x, "dt": dt, "b": b, "c": c, "rates": rates, "initial_state": initial_state}
    check_floating(op, **tensors)
    if x.dim() != 3 or b.dim() != 3 or 0 in (*x.shape, *b.shape):
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, b {tuple(b.shape)}; expected (batch, seqlen, channels) and "
            "(batch, seqlen, N), none of them 0"
        )
    (batch, seqlen, channels), states = x.shape, b.shape[2]
    check_shape(op, "dt", dt, (batch, seqlen, channels))
    check_shape(op, "b", b, (batch, seqlen, states))
    check_shape(op, "c", c, (batch, seqlen, states))
    check_shape(op, "rates", rates, (channels, states))
    check_cu_seqlens(op, cu_seqlens, batch, seqlen, x)
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_shape(op, "initial_state", initial_state, (rows, channels, states))
    check_finite(op, **tensors)
    check_backend(op, "triton", x, _no_kernel(states))
    return tuple(_s6_scan(ScanInputs(x, dt, b, c, rates, initial_state, cu_seqlens)))


def _no_kernel(d_state: int) -> str:
    """The reason why the kernels cannot be used; empty if they can."""
    return f"takes at most {WIDEST} states a channel, not {d_state}" if d_state > WIDEST else ""


def _like(given: ScanInputs, _: bool) -> ScanOutputs:
    rows = given.x.shape[0] if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
    shapes = given.x.shape, (rows, *given.rates.shape)
    return ScanOutputs(*(given.x.new_empty(shape, dtype=torch.float32) for shape in shapes))


def _flops(given: ScanInputs, *, backward: bool) -> int:
    """A state costs 5 to advance and 2 to read; backward it is advanced twice more, and has 16 for gradients."""
    return (26 if backward else 7) * math.prod(given.x) * given.b[2]


_s6_scan = register(Operation("s6_scan", ScanInputs, ScanOutputs), "s6.fused", _like, flops=_flops)
