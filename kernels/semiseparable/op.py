"""The semiseparable (SSD) and quasiseparable (Hydra) scans as ops: checks, backend choice, registration with
PyTorch.

Registered custom ops stay whole under torch.compile, can be named in selective activation checkpointing, and
are seen by FLOP counters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation
from matmix.kernels.checks import check_chunk_size, check_cu_seqlens, check_floating, check_shape
from matmix.kernels.semiseparable.backward import scan_backward
from matmix.kernels.semiseparable.forward import scan_forward
from matmix.kernels.semiseparable.setup import ScanSide, default_scan_chunk


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
        q, k: (batch, seqlen, ngroups, d_state); nheads a multiple of ngroups, consecutive heads share a
            group.
        log_decay: (batch, seqlen, nheads), (nheads,) or None for no decay; at most 0, -inf allowed.
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
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "semiseparable_scan"
    _check_scan(op, v, {"q": q, "k": k}, {"log_decay": log_decay, "diagonal": diagonal}, {"input_scale": input_scale})
    check_cu_seqlens(op, cu_seqlens, v.shape[0], v.shape[1], v)
    _check_state(op, "initial_state", initial_state, v, q, cu_seqlens)
    check_chunk_size(op, chunk_size)
    check_backend(op, backend, v)
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
    initial_state_forward: Tensor | None = None,
    initial_state_backward: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Bidirectional scan y = shift(SS_f(v)) + flip(shift(SS_b(flip v))) + diagonal v, without any flips.

    "Hydra" (arXiv 2407.09941). `shift` moves each direction's output one token on in its own sense and puts
    zero at the document's first (last) token, so that a token meets itself only through `diagonal`; without
    it the two scans are summed as they are. The backward direction's tensors are indexed by position like all
    others: nothing is flipped by the caller. Both directions may be given the same q or k.

    Args and errors as in `semiseparable_scan`. `initial_state_backward` is the state beyond the document's
    last token.

    Returns:
        y shaped and typed like v.
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
    _check_scan(op, v, vectors, {**decays, "diagonal": diagonal}, scales)
    check_cu_seqlens(op, cu_seqlens, v.shape[0], v.shape[1], v)
    _check_state(op, "initial_state_forward", initial_state_forward, v, q_forward, cu_seqlens)
    _check_state(op, "initial_state_backward", initial_state_backward, v, q_forward, cu_seqlens)
    check_chunk_size(op, chunk_size)
    check_backend(op, backend, v)
    return torch.ops.matmix.quasiseparable_scan(
        v,
        *vectors.values(),
        *decays.values(),
        *scales.values(),
        diagonal,
        initial_state_forward,
        initial_state_backward,
        cu_seqlens,
        shift,
        chunk_size,
        backend,
    )


def _check_scan(
    op: str,
    v: Tensor,
    vectors: dict[str, Tensor],
    factors: dict[str, Tensor | None],
    scales: dict[str, Tensor | None],
) -> None:
    check_floating(op, v=v, **vectors, **factors, **scales)
    if v.dim() != 4 or 0 in v.shape:
        raise ValueError(
            f"{op}: v has shape {tuple(v.shape)}; expected (batch, seqlen, nheads, headdim), none of them 0"
        )
    batch, seqlen, heads, _ = v.shape
    first, vector = next(iter(vectors.items()))
    if vector.dim() != 4 or 0 in vector.shape:
        raise ValueError(f"{op}: {first} has shape {tuple(vector.shape)}; expected (batch, seqlen, ngroups, d_state)")
    groups, d_state = vector.shape[2:]
    if heads % groups:
        raise ValueError(f"{op}: {heads} heads cannot share {groups} groups; make nheads a multiple of ngroups")
    for name, tensor in vectors.items():
        check_shape(op, name, tensor, (batch, seqlen, groups, d_state))
    for name, tensor in factors.items():
        if tensor is not None:
            check_shape(op, name, tensor, (batch, seqlen, heads), (heads,))
    for name, tensor in scales.items():
        if tensor is not None:
            check_shape(op, name, tensor, (batch, seqlen, heads))


def _check_state(op: str, name: str, state: Tensor | None, v: Tensor, q: Tensor, cu_seqlens: Tensor | None) -> None:
    if state is not None:
        check_floating(op, v=v, **{name: state})
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_shape(op, name, state, (rows, v.shape[2], q.shape[3], v.shape[3]))


def _or_empty(like: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """A registered op returns tensors only: an empty one stands for None."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def _none_if_absent(gradient: Tensor, of: Tensor | None) -> Tensor | None:
    return None if of is None else gradient


def _working_dtype(v: Tensor) -> torch.dtype:
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def _like(v: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(
        v.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs
    )


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
    run = implementation("semiseparable_scan", "forward", scan_forward, backend, v)
    side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
    y, final = run(v, (side,), diagonal, False, cu_seqlens, chunk_size, final_state)
    return y, *_or_empty(v, final)


@_semiseparable.register_fake
def _(v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, final_state, chunk_size, backend):
    rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (rows, v.shape[2], q.shape[3], v.shape[3])
    final = v.new_empty(shape, dtype=_working_dtype(v)) if final_state else v.new_empty(0)
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
    run = implementation("semiseparable_scan", "backward", scan_backward, backend, v)
    side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
    dv, (d,), ddiagonal = run(dy, dfinal, v, (side,), diagonal, False, cu_seqlens, chunk_size)
    return dv, d.q, d.k, *_or_empty(v, d.log_decay, d.input_scale, ddiagonal, d.initial_state)


@_semiseparable_backward.register_fake
def _(dy, dfinal, v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, chunk_size, backend):
    return _like(v, v, q, k, log_decay, input_scale, diagonal, initial_state)


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
    return *map(_none_if_absent, grads, saved[:7]), None, None, None, None


_semiseparable.register_autograd(_semiseparable_gradient, setup_context=_semiseparable_setup)


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
    chunk_size: int | None,
    backend: str,
) -> Tensor:
    run = implementation("quasiseparable_scan", "forward", scan_forward, backend, v)
    sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
    return run(v, sides, diagonal, shift, cu_seqlens, chunk_size, False)[0]


@_quasiseparable.register_fake
def _(v, *args):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("matmix::quasiseparable_scan_backward", mutates_args=())
def _quasiseparable_backward(
    dy: Tensor,
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
    chunk_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = implementation("quasiseparable_scan", "backward", scan_backward, backend, v)
    sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
    dv, (f, b), ddiagonal = run(dy, None, v, sides, diagonal, shift, cu_seqlens, chunk_size)
    rest = (
        f.log_decay,
        b.log_decay,
        f.input_scale,
        b.input_scale,
        ddiagonal,
        f.initial_state,
        b.initial_state,
    )
    return dv, f.q, f.k, b.q, b.k, *_or_empty(v, *rest)


@_quasiseparable_backward.register_fake
def _(dy, *args):
    return _like(args[0], *args[:12])


def _quasiseparable_setup(ctx, inputs, output):
    *tensors, ctx.shift, ctx.chunk_size, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _quasiseparable_gradient(ctx, dy):
    saved = ctx.saved_tensors
    grads = torch.ops.matmix.quasiseparable_scan_backward(dy, *saved, ctx.shift, ctx.chunk_size, ctx.backend)
    return *map(_none_if_absent, grads, saved[:12]), None, None, None, None


_quasiseparable.register_autograd(_quasiseparable_gradient, setup_context=_quasiseparable_setup)


def scan_flops(v_shape, q_shape, directions: int) -> int:
    """Multiply-adds times two of one forward pass in chunks."""
    batch, seqlen, heads, headdim = v_shape
    groups, d_state = q_shape[2:]
    chunk = default_scan_chunk(seqlen, d_state, headdim)
    scores = directions * groups * chunk * d_state
    states = directions * 2 * heads * d_state * headdim
    return 2 * batch * seqlen * (scores + heads * chunk * headdim + states)


@register_flop_formula(torch.ops.matmix.semiseparable_scan)
def _(v_shape, q_shape, *args, **kwargs) -> int:
    return scan_flops(v_shape, q_shape, 1)


@register_flop_formula(torch.ops.matmix.semiseparable_scan_backward)
def _(dy_shape, dfinal_shape, v_shape, q_shape, *args, **kwargs) -> int:
    return 3 * scan_flops(v_shape, q_shape, 1)


@register_flop_formula(torch.ops.matmix.quasiseparable_scan)
def _(v_shape, q_shape, *args, **kwargs) -> int:
    return scan_flops(v_shape, q_shape, 2)


@register_flop_formula(torch.ops.matmix.quasiseparable_scan_backward)
def _(dy_shape, v_shape, q_shape, *args, **kwargs) -> int:
    return 3 * scan_flops(v_shape, q_shape, 2)
