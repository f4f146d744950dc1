"""The causal (semiseparable, SSD) scan as an op: checks, backend choice, registration with PyTorch.

Registered custom ops stay whole under torch.compile, can be named in selective activation checkpointing, and
are seen by FLOP counters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation
from matmix.kernels.checks import check_chunk_size
from matmix.kernels.semiseparable.arguments import check_scan, empty_like_each, none_if_absent, or_empty
from matmix.kernels.semiseparable.backward import scan_backward
from matmix.kernels.semiseparable.flops import scan_flops
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.forward import scan_forward
from matmix.kernels.semiseparable.setup import scan_dtype


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
        q, k: (batch, seqlen, ngroups, d_state), typed like v; nheads a multiple of ngroups, consecutive heads
            share a group.
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
    run = implementation("semiseparable_scan", "backward", scan_backward, backend, v)
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
