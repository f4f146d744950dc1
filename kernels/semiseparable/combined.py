"""Backward passes of the scans that are not linear in v (rows divided by their sums, products of two directions): they
call the linear passes of any backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matmix.kernels.documents import shift_left
from matmix.kernels.semiseparable.form import ScanForm, ScanSide, SideGradients


def combined_backward(
    forward: Callable,
    backward: Callable,
    dy: Tensor,
    y: Tensor | None,
    row_sum: Tensor | None,
    rest: Tensor | None,
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, tuple[SideGradients, ...], Tensor | None]:
    """Gradients of a two-sided scan by a backend's `forward` and linear `backward`.

    y, row_sum and rest: what the forward pass gave; only needed with `form.normalize`.
    """
    exact = torch.promote_types(v.dtype, torch.float32)
    if form.normalize:
        # y = n / s, so dn = dy / s and ds = -dy . y / s.
        divided = (dy.to(exact) / (row_sum + form.eps).unsqueeze(-1)).to(v.dtype)
        drow_sum = -(divided.to(exact) * (y if rest is None else y.to(exact) + rest)).sum(-1)
        return backward(divided, drow_sum, None, v, sides, diagonal, form, cu_seqlens, chunk_size)
    if form.combine != "mult":
        return backward(dy, None, None, v, sides, diagonal, form, cu_seqlens, chunk_size)
    form = form._replace(combine="concat")
    first, second = forward(v, sides, None, form, cu_seqlens, chunk_size, False).y.chunk(2, -1)
    crossed = torch.cat([dy * second, dy * first], -1)
    dv, gradients, _ = backward(crossed, None, None, v, sides, None, form, cu_seqlens, chunk_size)
    if diagonal is None:
        return dv, gradients, None
    dv = (dv.to(exact) + diagonal.to(exact).unsqueeze(-1) * dy).to(v.dtype)
    along = (dy.to(exact) * v).sum(-1)
    return dv, gradients, (along.sum((0, 1)) if diagonal.dim() == 1 else along).to(diagonal.dtype)


def move_gates(log_decay: Tensor | None, gate_offset: int, cu_seqlens: Tensor | None) -> Tensor | None:
    """The backward direction's log-decays where each step's gate acts between a token and its left neighbour
    (`gate_offset` 1): one token to the left inside its document, no decay at the last one.
    """
    if gate_offset == 0 or log_decay is None or log_decay.dim() == 1:
        return log_decay
    return shift_left(log_decay, cu_seqlens)
