"""Semiseparable and quasiseparable scans in chunks, in PyTorch, with hand-written backward passes.

Within a chunk the mixer is a small matrix (scores q k^T times decays, lower triangle from the forward
direction, upper triangle from the backward one); between chunks only states of size d_state x headdim travel,
one direction each way. Nothing is flipped and no batch is doubled: the backward direction is the same
arithmetic under the mirrored mask, and Hydra's shift reads row t with q[t - 1] and the decays up to t - 1.
The backward pass keeps only the inputs and computes states and chunk matrices again.

Sources: "Transformers are SSMs" (arXiv 2405.21060), section 6, for the chunked form; "Hydra" (arXiv
2407.09941).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from matmix.kernels.documents import shift_left
from matmix.kernels.functions import Function, gradient_of
from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.chunked.setup import reduce_like
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanGradients, ScanSide


def combined_backward(
    forward: Callable,
    backward: Callable,
    dy: Tensor,
    dfinal: Tensor | None,
    y: Tensor | None,
    row_sum: Tensor | None,
    rest: Tensor | None,
    call: ScanCall,
) -> ScanGradients:
    """Returns the gradients of a scan by a backend's `forward` and linear `backward`.

    dfinal: of the final state, or None. y, row_sum and rest: results of the forward pass, only needed where the form
    normalises.
    """
    v, _, diagonal, form, *_ = call
    exact = torch.promote_types(v.dtype, torch.float32)
    if form.normalize:
        # y = n / s, so dn = dy / s and ds = -dy . y / s.
        divided = (dy.to(exact) / (row_sum + form.eps).unsqueeze(-1)).to(v.dtype)
        drow_sum = -(divided.to(exact) * (y if rest is None else y.to(exact) + rest)).sum(-1)
        return backward(divided, drow_sum, None, call)
    if form.combine != "mult":
        return backward(dy, None, dfinal, call)
    apart = call._replace(diagonal=None, form=form._replace(combine="concat"))
    first, second = forward(apart, False).y.chunk(2, -1)
    gradients = backward(torch.cat([dy * second, dy * first], -1), None, None, apart)
    if diagonal is None:
        return gradients
    dv = (gradients.v.to(exact) + diagonal.to(exact).unsqueeze(-1) * dy).to(v.dtype)
    along = (dy.to(exact) * v).sum(-1)
    return ScanGradients(dv, gradients.sides, reduce_like(along, diagonal))


def move_gates(log_decay: Tensor | None, gate_offset: int, cu_seqlens: Tensor | None) -> Tensor | None:
    """The backward direction's log-decays where each step's gate acts between a token and its left neighbour
    (`gate_offset` 1): one token to the left inside its document, no decay at the last one.
    """
    if gate_offset == 0 or log_decay is None or log_decay.dim() == 1:
        return log_decay
    return shift_left(log_decay, cu_seqlens)


def scan_call(
    form: ScanForm, chunk_size: int | None, v: Tensor, diagonal: Tensor | None, cu_seqlens: Tensor | None, *parts: Any
) -> ScanCall:
    """Puts a call together from its options and tensors. parts: those of the first side, then of the second, if any."""
    sides = tuple(ScanSide(*parts[start : start + 5], start > 0) for start in range(0, len(parts), 5))
    return ScanCall(v, sides, diagonal, form, cu_seqlens, chunk_size)


class ScanFunction(Function):
    """`scan_forward` of the call that `scan_call` makes of all arguments but the first."""

    @staticmethod
    def forward(final_state, *arguments):
        return tuple(scan_forward(scan_call(*arguments), final_state))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, form, chunk_size, *tensors = inputs
        y, row_sum, _, rest = output
        ctx.save_for_backward(y if form.normalize else None, row_sum, rest, *tensors)
        ctx.mark_non_differentiable(*(x for x in (row_sum, rest) if x is not None))
        ctx.set_materialize_grads(False)
        ctx.options = form, chunk_size

    @staticmethod
    def backward(ctx, dy, _drow_sum, dfinal, _drest):
        y, row_sum, rest, *tensors = ctx.saved_tensors
        return None, None, None, *gradient_of(scan_gradient, dy, dfinal, y, row_sum, rest, *ctx.options, *tensors)


def scan_gradient(
    dy: Tensor | None, dfinal: Tensor | None, y: Tensor | None, row_sum: Tensor | None, rest: Tensor | None, *arguments
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors of `scan_call`, in its order."""
    call = scan_call(*arguments)
    if dy is None:
        width = 2 if call.form.combine == "concat" else 1
        dy = call.v.new_zeros(*call.v.shape[:-1], width * call.v.shape[-1])
    dv, sides, ddiagonal = combined_backward(scan_forward, scan_backward, dy, dfinal, y, row_sum, rest, call)
    return dv, ddiagonal, None, *(gradient for side in sides for gradient in side)


def semiseparable_chunked(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    *,
    input_scale: Tensor | None = None,
    diagonal: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`semiseparable_scan` in PyTorch, without argument checks; see there."""
    side = (q, k, log_decay, input_scale, initial_state)
    y, _, final, _ = ScanFunction.apply(return_final_state, ScanForm(), chunk_size, v, diagonal, cu_seqlens, *side)
    return (y, final) if return_final_state else y


def quasiseparable_chunked(
    v: Tensor,
    q_forward: Tensor,
    k_forward: Tensor,
    q_backward: Tensor,
    k_backward: Tensor,
    log_decay_forward: Tensor | None,
    log_decay_backward: Tensor | None,
    *,
    input_scale_forward: Tensor | None = None,
    input_scale_backward: Tensor | None = None,
    diagonal: Tensor | None = None,
    shift: bool = True,
    combine: str = "add",
    self_term: str = "sum",
    normalize: str | None = None,
    eps: float = 1e-6,
    gate_offset: int = 0,
    initial_state_forward: Tensor | None = None,
    initial_state_backward: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """`quasiseparable_scan` in PyTorch, without argument checks; see there."""
    log_decay_backward = move_gates(log_decay_backward, gate_offset, cu_seqlens)
    return ScanFunction.apply(
        False, ScanForm(shift, combine, self_term, normalize is not None, eps), chunk_size, v, diagonal, cu_seqlens,
        q_forward, k_forward, log_decay_forward, input_scale_forward, initial_state_forward,
        q_backward, k_backward, log_decay_backward, input_scale_backward, initial_state_backward,
    )[0]  # fmt: skip
