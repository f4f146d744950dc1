"""The matrix memory as an op: checks, registration with PyTorch."""

import math
from functools import partial

import torch
from torch import Tensor

from matmix.kernels.checks import check_cu_seqlens, check_finite, check_floating, check_shape
from matmix.kernels.context import Context
from matmix.kernels.functions import working_dtype
from matmix.kernels.matrix_memory.chunked import MATRIX_MEMORY, MemoryInputs, MemoryOutputs, edges_like
from matmix.kernels.matrix_memory.parts import memory_in_parts
from matmix.kernels.registration import register

ORDERS = (2, 4, 8)
"""Orders of transitions that the kernels take."""


def matrix_memory(
    values: Tensor,
    elements: Tensor,
    keys: Tensor,
    queries: Tensor,
    rates: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """S_t = S_{t-1} A_t + v_t (rates k_t)^T, y_t = S_t q_t: a memory of P x N numbers a head, which every token turns
    and lets fade by a matrix A_t of its own, adds its values to under a key, and reads by a query.

    It is the lower left block of a product of affine state matrices, H_t = H_{t-1} [[A_t, 0], [v_t (rates k_t)^T, I]]
    (the construction "affine" of `build_state_matrices`), read by q_t. A_t (N x N) is I + M_t, each row divided by the
    sum of its absolute values where that is above 1, so that no row of S grows but by what is added.

    Args:
        values: v, (batch, seqlen, nheads, P).
        elements: M_t row by row, (batch, seqlen, nheads, N^2).
        keys: (batch, seqlen, N), those of all heads.
        queries: (batch, seqlen, N).
        rates: (nheads, N), factors of keys.
        initial_state: S_0, (batch, nheads, P, N), or (documents, ...) with `cu_seqlens`; None for zeros.
        return_final_state: also return the state after the last token (of each document).
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1).
        context: the ranks that hold the other parts of the rows, as `matmix.kernels.context` says. Initial states are
            then taken where the first token of a row or document is, and last ones returned where its last one is,
            zeros elsewhere.
        backend: "auto", "torch" or "triton".

    Returns:
        y (batch, seqlen, nheads, P) typed like the values; with `return_final_state` (y, states), these float32
        (float64 for float64 values) whatever the inputs are.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "matrix_memory"
    tensors = {"values": values, "elements": elements, "keys": keys, "queries": queries, "rates": rates}
    check_floating(op, **tensors, initial_state=initial_state)
    if values.dim() != 4 or keys.dim() != 3 or 0 in (*values.shape, *keys.shape):
        raise ValueError(
            f"{op}: values have shape {tuple(values.shape)}, keys {tuple(keys.shape)}; expected (batch, seqlen, nheads,"
            " P) and (batch, seqlen, N), none of them 0"
        )
    (batch, seqlen, heads, width), order = values.shape, keys.shape[2]
    check_shape(op, "elements", elements, (batch, seqlen, heads, order**2))
    check_shape(op, "keys", keys, (batch, seqlen, order))
    check_shape(op, "queries", queries, (batch, seqlen, order))
    check_shape(op, "rates", rates, (heads, order))
    check_cu_seqlens(op, cu_seqlens, batch, seqlen, values, part=context is not None)
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_shape(op, "initial_state", initial_state, (rows, heads, width, order))
    check_finite(op, **tensors, initial_state=initial_state)
    given = MemoryInputs(values, elements, keys, queries, rates, initial_state, cu_seqlens)
    run = partial(_matrix_memory, backend=backend)
    y, final, *_ = run(given) if context is None else memory_in_parts(run, given, context)
    return (y, final) if return_final_state else y


def no_kernel(given: MemoryInputs) -> str:
    """The reason why the Triton form cannot be used; empty if it can."""
    order, width = given.keys.shape[2], given.values.shape[3]
    if order not in ORDERS:
        return f"takes keys of {', '.join(map(str, ORDERS[:-1]))} or {ORDERS[-1]} numbers, not {order}"
    return f"takes at most 64 values a head, not {width}" if width > 64 else ""


def _like(given: MemoryInputs, fused: bool) -> MemoryOutputs:
    batch, _, heads, width = given.values.shape
    rows = batch if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
    y = torch.empty_like(given.values, memory_format=torch.contiguous_format)
    final = y.new_empty((rows, heads, width, given.keys.shape[2]), dtype=working_dtype(y))
    if fused:
        from matmix.kernels.matrix_memory.fused import edges_like as slots_like

        return MemoryOutputs(y, final, slots_like(given))
    return MemoryOutputs(y, final, edges_like(given))


def _flops(given: MemoryInputs, *, backward: bool) -> int:
    """A token turns, adds to and reads its states, and the products since its chunk began; backward it does so again,
    turns the cotangent and has the gradients of A, which are as much, and of four vectors."""
    width, order = given.values[3], given.keys[2]
    token = order * (width * (order + 2) + order * (order + 1))
    if backward:
        token += order * width * (2 * order + 4)
    return 2 * math.prod(given.values[:3]) * token


_matrix_memory = register(MATRIX_MEMORY, "matrix_memory.fused", _like, flops=_flops, why_not=no_kernel)
