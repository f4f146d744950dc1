"""The semiseparable (SSD, causal) and quasiseparable (Hydra, LION, bidirectional) scans as ops: checks, backend choice,
registration with PyTorch.

Registered custom ops stay whole under torch.compile, can be named in selective activation checkpointing, and
are seen by FLOP counters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation
from matmix.kernels.checks import check_chunk_size
from matmix.kernels.semiseparable.arguments import (
    check_form,
    check_scan,
    empty_like_each,
    no_kernel,
    none_if_absent,
    or_empty,
)
from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.chunked.setup import scan_dtype
from matmix.kernels.semiseparable.combined import combined_backward, move_gates
from matmix.kernels.semiseparable.flops import scan_flops
from matmix.kernels.semiseparable.form import ScanForm, ScanSide


def semiseparable_scan(
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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal scan h_t = exp(log_decay_t) h_{t-1} + input_scale_t k_t v_t^T, y_t = q_t^T h_t + diagonal_t v_t.

    "Transformers are SSMs" (arXiv 2405.21060): with log_decay = dt A and input_scale = dt it is the core of
    the SSD layer; without decays it is linear attention, with constant ones RetNet.

    Args:
        v: values (batch, seqlen, nheads, headdim).
        q: (batch, seqlen, ngroups, d_state), typed like v; nheads a multiple of ngroups, consecutive heads share
            a group.
        k: shaped and typed like q.
        log_decay: (batch, seqlen, nheads), (nheads,) or None for no decay; -inf forgets everything. At most
            LARGEST_LOG_DECAY = 0.01: more is a ValueError on the CPU and taken as 0.01 on accelerators, where
            nobody waits to look (see `matmix.kernels.checks`).
        input_scale: (batch, seqlen, nheads) or None for 1.
        diagonal: (batch, seqlen, nheads), (nheads,) or None for no skip.
        initial_state: (batch, nheads, d_state, headdim), or (documents, ...) with `cu_seqlens`; None for
            zero.
        return_final_state: also return the state after the last token (of each document).
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1). A
            document's output does not depend on its neighbours. A document without tokens passes its state
            through.
        chunk_size: 16, 32, 64, 128 or 256; None lets the backend choose.
        backend: "auto", "torch" or "triton".

    Returns:
        y shaped and typed like v; with `return_final_state` also the states, float32 (float64 for float64
        inputs). Sums and states are float32 throughout whatever the inputs are (float64 for float64).

    Raises:
        ValueError: a shape, dtype, device, bound or option does not fit.
    """
    op = "semiseparable_scan"
    check_scan(
        op,
        v,
        {"q": q, "k": k},
        {"log_decay": log_decay},
        {"input_scale": input_scale},
        diagonal,
        {"initial_state": initial_state},
        cu_seqlens,
    )
    check_chunk_size(op, chunk_size)
    check_backend(op, backend, v, no_kernel(v, q))
    y, final = torch.ops.matmix.semiseparable_scan(
        v,
        q,
        k,
        log_decay,
        input_scale,
        diagonal,
        initial_state,
        cu_seqlens,
        return_final_state,
        chunk_size,
        backend,
    )
    return (y, final) if return_final_state else y


@torch.library.custom_op("matmix::semiseparable_scan", mutates_args=())
def _semiseparable(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    input_scale: Tensor | None,
    diagonal: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    final_state: bool,
    chunk_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    run = implementation("semiseparable_scan", "forward", scan_forward, backend, v, no_kernel(v, q))
    side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
    y, _, final, _ = run(v, (side,), diagonal, ScanForm(), cu_seqlens, chunk_size, final_state)
    return y, *or_empty(v, final)


@_semiseparable.register_fake
def _(v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, final_state, chunk_size, backend):
    rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (rows, v.shape[2], q.shape[3], v.shape[3])
    final = v.new_empty(shape, dtype=scan_dtype(v)) if final_state else v.new_empty(0)
    return torch.empty_like(v, memory_format=torch.contiguous_format), final


@torch.library.custom_op("matmix::semiseparable_scan_backward", mutates_args=())
def _semiseparable_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    input_scale: Tensor | None,
    diagonal: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = implementation("semiseparable_scan", "backward", scan_backward, backend, v, no_kernel(v, q))
    side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
    dv, (d,), ddiagonal = run(dy, None, dfinal, v, (side,), diagonal, ScanForm(), cu_seqlens, chunk_size)
    return dv, d.q, d.k, *or_empty(v, d.log_decay, d.input_scale, ddiagonal, d.initial_state)


@_semiseparable_backward.register_fake
def _(dy, dfinal, v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, chunk_size, backend):
    return empty_like_each(v, v, q, k, log_decay, input_scale, diagonal, initial_state)


def _semiseparable_setup(ctx, inputs, output):
    *tensors, _, ctx.chunk_size, ctx.backend = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.final_state = inputs[8]


def _semiseparable_gradient(ctx, dy, dfinal):
    saved = ctx.saved_tensors
    dy = torch.zeros_like(saved[0]) if dy is None else dy
    dfinal = dfinal if ctx.final_state else None
    grads = torch.ops.matmix.semiseparable_scan_backward(dy, dfinal, *saved, ctx.chunk_size, ctx.backend)
    return *map(none_if_absent, grads, saved[:7]), None, None, None, None


_semiseparable.register_autograd(_semiseparable_gradient, setup_context=_semiseparable_setup)


@register_flop_formula(torch.ops.matmix.semiseparable_scan)
def _(v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, final_state, chunk_size, *_, **__) -> int:
    return scan_flops(v, q, 1, ScanForm(), chunk_size, backward=False)


@register_flop_formula(torch.ops.matmix.semiseparable_scan_backward)
def _(dy, dfinal, v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, chunk_size, *_, **__) -> int:
    return scan_flops(v, q, 1, ScanForm(), chunk_size, backward=True)


def quasiseparable_scan(
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
    backend: str = "auto",
) -> Tensor:
    """Bidirectional scan y = shift(SS_f(v)) + flip(shift(SS_b(flip v))) + diagonal v, without any flips.

    "Hydra" (arXiv 2407.09941); with shift=False, self_term="mean", normalize="row_sum" and gate_offset=1 it is
    LION (arXiv 2502.16249), Y = (Q K^T * M) V over its row sums. The backward direction's tensors are indexed
    by position like all others: nothing is flipped by the caller. Both directions may be given the same q or
    k, which is not copied.

    Tensors, packing, chunks, backends and errors are those of `semiseparable_scan`;
    `initial_state_backward` is the state beyond the document's last token.

    Args:
        shift: move each direction's output one token on in its own sense and put zero at the document's first
            (last) token, so that a token meets itself only through `diagonal`; else the scans are taken as
            they are.
        combine: "add"; "mult", SS_f(v) * SS_b(v) + diagonal v; or "concat", [SS_f(v) + diagonal v | SS_b(v) +
            diagonal v], which is 2 * headdim wide.
        self_term: without shift, a token's own terms q_t . k_t count in full in both directions ("sum") or
            half in each ("mean", "add" only).
        normalize: None, or "row_sum" to divide each output by the sum of its row of the mixer, diagonal
            included, plus `eps` ("add" only, without initial states).
        eps: added to the row sums, not negative.
        gate_offset: the backward direction decays between token t and a later token s by log_decay_backward
            at t .. s - 1 (0, a flipped causal scan) or at t + 1 .. s (1, LION: each step's gate acts between
            it and its left neighbour in both directions).

    Returns:
        y typed and (but for "concat") shaped like v.
    """
    op = "quasiseparable_scan"
    vectors = {
        "q_forward": q_forward,
        "k_forward": k_forward,
        "q_backward": q_backward,
        "k_backward": k_backward,
    }
    decays = {"log_decay_forward": log_decay_forward, "log_decay_backward": log_decay_backward}
    scales = {"input_scale_forward": input_scale_forward, "input_scale_backward": input_scale_backward}
    states = {"initial_state_forward": initial_state_forward, "initial_state_backward": initial_state_backward}
    check_form(op, shift, combine, self_term, normalize, eps, gate_offset, states)
    check_scan(op, v, vectors, decays, scales, diagonal, states, cu_seqlens)
    check_chunk_size(op, chunk_size)
    check_backend(op, backend, v, no_kernel(v, q_forward))
    y, *_ = torch.ops.matmix.quasiseparable_scan(
        v,
        *vectors.values(),
        log_decay_forward,
        move_gates(log_decay_backward, gate_offset, cu_seqlens),
        *scales.values(),
        diagonal,
        *states.values(),
        cu_seqlens,
        shift,
        combine,
        self_term,
        normalize is not None,
        float(eps),
        chunk_size,
        backend,
    )
    return y


@torch.library.custom_op("matmix::quasiseparable_scan", mutates_args=())
def _quasiseparable(
    v: Tensor,
    qf: Tensor,
    kf: Tensor,
    qb: Tensor,
    kb: Tensor,
    af: Tensor | None,
    ab: Tensor | None,
    wf: Tensor | None,
    wb: Tensor | None,
    diagonal: Tensor | None,
    hf: Tensor | None,
    hb: Tensor | None,
    cu_seqlens: Tensor | None,
    shift: bool,
    combine: str,
    self_term: str,
    normalize: bool,
    eps: float,
    chunk_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    run = implementation("quasiseparable_scan", "forward", scan_forward, backend, v, no_kernel(v, qf))
    sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
    form = ScanForm(shift, combine, self_term, normalize, eps)
    y, row_sum, _, rest = run(v, sides, diagonal, form, cu_seqlens, chunk_size, False)
    return y, *or_empty(v, row_sum, rest)


@_quasiseparable.register_fake
def _(v, qf, kf, qb, kb, af, ab, wf, wb, d, hf, hb, cu_seqlens, shift, combine, self_term, normalize, *_):
    width = v.shape[3] * (2 if combine == "concat" else 1)
    row_sum = v.new_empty(v.shape[:3], dtype=scan_dtype(v)) if normalize else v.new_empty(0)
    rest = (
        torch.empty_like(v, memory_format=torch.contiguous_format) if normalize and v.itemsize < 4 else v.new_empty(0)
    )
    return v.new_empty(*v.shape[:3], width), row_sum, rest


@torch.library.custom_op("matmix::quasiseparable_scan_backward", mutates_args=())
def _quasiseparable_backward(
    dy: Tensor,
    y: Tensor | None,
    row_sum: Tensor | None,
    rest: Tensor | None,
    v: Tensor,
    qf: Tensor,
    kf: Tensor,
    qb: Tensor,
    kb: Tensor,
    af: Tensor | None,
    ab: Tensor | None,
    wf: Tensor | None,
    wb: Tensor | None,
    diagonal: Tensor | None,
    hf: Tensor | None,
    hb: Tensor | None,
    cu_seqlens: Tensor | None,
    shift: bool,
    combine: str,
    self_term: str,
    normalize: bool,
    eps: float,
    chunk_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    why_not = no_kernel(v, qf)
    forward = implementation("quasiseparable_scan", "forward", scan_forward, backend, v, why_not)
    backward = implementation("quasiseparable_scan", "backward", scan_backward, backend, v, why_not)
    sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
    form = ScanForm(shift, combine, self_term, normalize, eps)
    dv, (f, b), ddiagonal = combined_backward(
        forward, backward, dy, y, row_sum, rest, v, sides, diagonal, form, cu_seqlens, chunk_size
    )
    factors = (f.log_decay, b.log_decay, f.input_scale, b.input_scale, ddiagonal)
    return dv, f.q, f.k, b.q, b.k, *or_empty(v, *factors, f.initial_state, b.initial_state)


@_quasiseparable_backward.register_fake
def _(dy, y, row_sum, rest, *args):
    return empty_like_each(args[0], *args[:12])


def _quasiseparable_setup(ctx, inputs, output):
    *tensors, shift, combine, self_term, normalize, eps, chunk_size, backend = inputs
    y, row_sum, rest = output
    ctx.mark_non_differentiable(row_sum, rest)
    # No zeros in place of the gradients that these have not.
    ctx.set_materialize_grads(False)
    normal = (y, row_sum, rest if rest.numel() else None) if normalize else (None, None, None)
    ctx.save_for_backward(*normal, *tensors)
    ctx.options, ctx.output = (shift, combine, self_term, normalize, eps, chunk_size, backend), y.shape


def _quasiseparable_gradient(ctx, dy, *_):
    saved = ctx.saved_tensors
    dy = torch.zeros(ctx.output, dtype=saved[3].dtype, device=saved[3].device) if dy is None else dy
    grads = torch.ops.matmix.quasiseparable_scan_backward(dy, *saved, *ctx.options)
    return *map(none_if_absent, grads, saved[3:15]), *[None] * (1 + len(ctx.options))


_quasiseparable.register_autograd(_quasiseparable_gradient, setup_context=_quasiseparable_setup)


@register_flop_formula(torch.ops.matmix.quasiseparable_scan)
def _(v, qf, *rest, **_) -> int:
    return _flops(v, qf, rest[-7:], backward=False)


@register_flop_formula(torch.ops.matmix.quasiseparable_scan_backward)
def _(dy, y, row_sum, rest, v, qf, *others, **_) -> int:
    return _flops(v, qf, others[-7:], backward=True)


def _flops(v, qf, options: tuple, *, backward: bool) -> int:
    *form, chunk_size, _ = options
    return scan_flops(v, qf, 2, ScanForm(*form), chunk_size, backward=backward)
