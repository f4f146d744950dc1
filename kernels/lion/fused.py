"""The Triton form of LION's mixing: launches the kernels of feature maps, gates and scan.

The gradients of q, k and v go into one buffer, that of the projection. Nothing here reads values from the device or
waits for it, so both passes can be captured in a CUDA graph.
"""

import torch
import triton
from torch import Tensor

from matmix.kernels.launching import launch, rows_in_place
from matmix.kernels.lion.chunked import LionInputs, LionOutputs
from matmix.kernels.lion.elements import feature_gradients, features, gate_gradients, log_gates, row_gradients
from matmix.kernels.semiseparable.form import ScanCall, ScanSide
from matmix.kernels.semiseparable.fused import launch as scan
from matmix.kernels.semiseparable.fused.launch import Into
from matmix.kernels.slots import count_slots, slot_table

_ELEMENTS = 2048
"""Elements of a tile of vectors."""
_SPAN = 128
"""Tokens of a piece of a document whose gates a program looks at."""
_HEADS = 16


def forward(given: LionInputs) -> LionOutputs:
    qkv, gates = given.qkv, given.gates
    decays = None
    if gates is not None:
        decays = torch.empty((2, *gates.shape), dtype=torch.float32, device=gates.device)
        _on_gates(log_gates, given, (), tuple(decays))
    out = scan.forward(_scan_call(rows_in_place(qkv), decays, given), False)
    return LionOutputs(out.y, out.row_sum, out.rest, decays)


def backward(given: LionInputs, outputs: LionOutputs, cotangents: LionOutputs) -> tuple[Tensor | None, ...]:
    """Gradients of qkv, gates and log-decays. Features are computed again."""
    qkv, gates = given.qkv, given.gates
    y, row_sum, rest, decays = outputs
    dy, dsums = torch.zeros_like(y) if cotangents.y is None else cotangents.y, cotangents.row_sum
    qkv = rows_in_place(qkv)
    call = _scan_call(qkv, decays, given)
    v = call.v
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    headdim, vectors = v.shape[3], 2 * given.nheads
    dy = rows_in_place(dy.flatten(-2)).flatten(0, 1)
    dn = torch.empty_like(y, memory_format=torch.contiguous_format)
    drow_sum = torch.empty_like(row_sum)
    _on_vectors(
        row_gradients, row_sum.numel(), headdim,
        dy, None if dsums is None else dsums.contiguous(), y.contiguous(), rest, row_sum, dn, drow_sum, row_sum.numel(),
        given.nheads, headdim, given.eps, dy.stride(0), SUMS=dsums is not None, REST=rest is not None,
    )  # fmt: skip
    # Each direction has gradients of q and of k, which feature_gradients adds.
    dfeatures = torch.empty(*qkv.shape[:2], 2, 2, given.nheads, headdim, dtype=qkv.dtype, device=qkv.device)
    dq, dk = ([dfeatures[:, :, side, which] for side in (0, 1)] for which in (0, 1))
    dv = dqkv[..., vectors * headdim :].unflatten(-1, v.shape[2:])
    _, (first, second), _ = scan.backward(dn, drow_sum, None, call, Into(dv, tuple(dq), tuple(dk)))
    x, dx = qkv.flatten(0, 1), dqkv.flatten(0, 1)
    _on_vectors(
        feature_gradients, x.shape[0] * vectors, headdim,
        dfeatures, x, dx, x.shape[0] * vectors, vectors, headdim, headdim**-0.5, 2 * vectors * headdim, x.stride(0),
        dx.stride(0), FEATURES=given.feature_map,
    )  # fmt: skip
    dgates = ddecays = None
    if given.log_decays is not None:
        ddecays = torch.stack([first.log_decay, second.log_decay])
    if gates is not None:
        dgates = torch.empty_like(gates, memory_format=torch.contiguous_format)
        _on_gates(gate_gradients, given, (first.log_decay, second.log_decay), (dgates,))
    return dqkv, dgates, ddecays


def _scan_call(qkv: Tensor, decays: Tensor | None, given: LionInputs) -> ScanCall:
    """The scan of v, a view of qkv. decays: those of `gates`."""
    batch, seqlen, width = qkv.shape
    inner, headdim = width // 3, width // 3 // given.nheads
    mapped = torch.empty(batch, seqlen, 2, given.nheads, headdim, dtype=qkv.dtype, device=qkv.device)
    x, vectors = qkv.flatten(0, 1), 2 * given.nheads
    _on_vectors(
        features, batch * seqlen * vectors, headdim,
        x, mapped, batch * seqlen * vectors, vectors, headdim, headdim**-0.5, x.stride(0), FEATURES=given.feature_map,
    )  # fmt: skip
    q, k = mapped.unbind(2)
    decays = given.log_decays if decays is None else decays
    first, second = (None, None) if decays is None else decays
    sides = ScanSide(q, k, first, None, None, False), ScanSide(q, k, second, None, None, True)
    v = qkv[..., 2 * inner :].unflatten(-1, (given.nheads, headdim))
    return ScanCall(v, sides, None, given.scan, given.cu_seqlens, context=given.context)


def _on_vectors(kernel, rows: int, width: int, *arguments, **constants) -> None:
    """Launch a kernel on tiles of whole vectors."""
    columns = triton.next_power_of_2(width)
    tall = max(1, _ELEMENTS // columns)
    launch(
        kernel, (triton.cdiv(rows, tall),), *arguments, ROWS=tall, COLUMNS=columns, num_warps=4, num_stages=1,
        **constants,
    )  # fmt: skip


def _on_gates(kernel, given: LionInputs, before: tuple, after: tuple) -> None:
    """Launch a kernel on pieces of documents. Gates of heads alone are one token, and act everywhere."""
    gates, per_token = given.gates, given.gates.dim() == 3
    rows, seqlen = gates.shape[:2] if per_token else (1, 1)
    cu_seqlens = given.cu_seqlens if per_token else None
    heads = gates.shape[-1]
    block = min(_HEADS, triton.next_power_of_2(heads))
    logits = (rows_in_place(gates) if per_token else gates.contiguous().view(1, 1, -1)).flatten(0, 1)
    launch(
        kernel, (count_slots(rows, seqlen, cu_seqlens, _SPAN), triton.cdiv(heads, block)),
        *before, logits, *after, slot_table(rows, seqlen, cu_seqlens, _SPAN),
        seqlen, triton.cdiv(seqlen, _SPAN), heads, logits.stride(0),
        OFFSET=given.gate_offset if per_token else 0, DELAY=given.forward_gate_offset if per_token else 0,
        PACKED=cu_seqlens is not None, SPAN=_SPAN, BLOCK_H=block, num_warps=4, num_stages=1,
    )  # fmt: skip
