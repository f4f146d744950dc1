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
    y: Tensor | None,
    row_sum: Tensor | None,
    rest: Tensor | None,
    call: ScanCall,
) -> ScanGradients:
    """Returns the gradients of a two-sided scan by a backend's `forward` and linear `backward`.

    y, row_sum and rest: results of the forward pass; only needed where the form normalises.
    """
    v, _, diagonal, form, *_ = call
    exact = torch.promote_types(v.dtype, torch.float32)
    if form.normalize:
        # y = n / s, so dn = dy / s and ds = -dy . y / s.
        divided = (dy.to(exact) / (row_sum + form.eps).unsqueeze(-1)).to(v.dtype)
        drow_sum = -(divided.to(exact) * (y if rest is None else y.to(exact) + rest)).sum(-1)
        return backward(divided, drow_sum, None, call)
    if form.combine != "mult":
        return backward(dy, None, None, call)
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


class SemiseparableFunction(Function):
    @staticmethod
    def forward(v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, final_state, chunk_size):
        side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
        output = scan_forward(ScanCall(v, (side,), diagonal, ScanForm(), cu_seqlens, chunk_size), final_state)
        return output.y, output.final

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, _, ctx.chunk_size = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy, dfinal):
        gradients = gradient_of(semiseparable_gradient, dy, dfinal, *ctx.saved_tensors, ctx.chunk_size)
        return *gradients, None, None, None


def semiseparable_gradient(
    dy, dfinal, v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, chunk_size
) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors from v to initial_state."""
    dy = torch.zeros_like(v) if dy is None else dy
    side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
    call = ScanCall(v, (side,), diagonal, ScanForm(), cu_seqlens, chunk_size)
    dv, (dside,), ddiagonal = scan_backward(dy, None, dfinal, call)
    return dv, dside.q, dside.k, dside.log_decay, dside.input_scale, ddiagonal, dside.initial_state


class QuasiseparableFunction(Function):
    @staticmethod
    def forward(v, qf, kf, qb, kb, af, ab, wf, wb, diagonal, hf, hb, cu_seqlens, form, chunk_size):
        sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
        output = scan_forward(ScanCall(v, sides, diagonal, form, cu_seqlens, chunk_size), False)
        return output.y, output.row_sum, output.rest

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, form, chunk_size = inputs
        y, *sums = output
        ctx.save_for_backward(y if form.normalize else None, *sums, *tensors)
        ctx.mark_non_differentiable(*(x for x in sums if x is not None))
        ctx.options = form, chunk_size

    @staticmethod
    def backward(ctx, dy, *_):
        gradients = gradient_of(quasiseparable_gradient, dy, *ctx.saved_tensors, *ctx.options)
        return *gradients, None, None, None


def quasiseparable_gradient(
    dy, y, row_sum, rest, v, qf, kf, qb, kb, af, ab, wf, wb, diagonal, hf, hb, cu_seqlens, form, chunk_size
) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors from v to hb."""
    sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
    call = ScanCall(v, sides, diagonal, form, cu_seqlens, chunk_size)
    dv, (f, b), ddiagonal = combined_backward(scan_forward, scan_backward, dy, y, row_sum, rest, call)
    scans = (f.q, f.k, b.q, b.k, f.log_decay, b.log_decay, f.input_scale, b.input_scale)
    return dv, *scans, ddiagonal, f.initial_state, b.initial_state


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
    y, final = SemiseparableFunction.apply(
        v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, return_final_state, chunk_size
    )
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
    y, *_ = QuasiseparableFunction.apply(
        v,
        q_forward,
        k_forward,
        q_backward,
        k_backward,
        log_decay_forward,
        move_gates(log_decay_backward, gate_offset, cu_seqlens),
        input_scale_forward,
        input_scale_backward,
        diagonal,
        initial_state_forward,
        initial_state_backward,
        cu_seqlens,
        ScanForm(shift, combine, self_term, normalize is not None, eps),
        chunk_size,
    )
    return y
