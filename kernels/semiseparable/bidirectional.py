"""The bidirectional (quasiseparable) scan as an op: checks, backend choice, registration with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation
from matmix.kernels.checks import check_chunk_size
from matmix.kernels.semiseparable.arguments import check_form, check_scan, empty_like_each, none_if_absent, or_empty
from matmix.kernels.semiseparable.backward import scan_backward
from matmix.kernels.semiseparable.combined import combined_backward, move_gates
from matmix.kernels.semiseparable.flops import scan_flops
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.forward import scan_forward
from matmix.kernels.semiseparable.setup import scan_dtype


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
    check_backend(op, backend, v)
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
    run = implementation("quasiseparable_scan", "forward", scan_forward, backend, v)
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
    forward = implementation("quasiseparable_scan", "forward", scan_forward, backend, v)
    backward = implementation("quasiseparable_scan", "backward", scan_backward, backend, v)
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
    normal = (y, row_sum, rest if rest.numel() else None) if normalize else (None, None, None)
    ctx.save_for_backward(*normal, *tensors)
    ctx.options = shift, combine, self_term, normalize, eps, chunk_size, backend


def _quasiseparable_gradient(ctx, dy, *_):
    saved = ctx.saved_tensors
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
