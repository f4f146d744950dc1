"""The matrix-product scan (MRU) as an op: checks, backend choice, registration with PyTorch."""

from functools import partial

import torch
from torch import Tensor

from matmix.kernels.checks import check_choice, check_cu_seqlens, check_finite, check_floating, check_shape
from matmix.kernels.context import Context, context_name
from matmix.kernels.functions import working_dtype
from matmix.kernels.matrix_product.chunked import MATRIX_PRODUCT, ProductInputs, ProductOutputs, run_product
from matmix.kernels.matrix_product.scans import SCANS, walked_product
from matmix.kernels.matrix_product.spans import ORDERS, products_like
from matmix.kernels.registration import register


def matrix_product_scan(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    chunk_size: int | None = None,
    context: Context | None = None,
    columns: int = 0,
    scan: str = "chunked",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Running products of matrices, H_t = H_{t-1} X_t, in every head: the core of the MRU.

    Args:
        x: (batch, seqlen, nheads, o, o), o one of 4, 8, 16, 32.
        initial_state: H_0, (batch, nheads, o, o) float32, or (documents, ...) with `cu_seqlens`; None for the identity.
        return_final_state: also return the state after the last token (of each document).
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1); the product starts
            anew at each. On an accelerator the PyTorch form reads them back to the host; the Triton form, which "auto"
            takes there, does not.
        reverse: run from the last token to the first, H_t = H_{t+1} X_t; the final state is then the first token's.
        chunk_size: steps per chunk of the PyTorch form, any positive number; None lets it choose. The Triton form has
            its own.
        context: the ranks that hold the other parts of the rows, as `matmix.kernels.context` says; not with `reverse`.
            Initial states are taken where the first token of the row or document is, final states returned where its
            last one is, zeros elsewhere.
        columns: where the columns behind so many are the identity's, in all of x, and no initial state is given: ranks
            send only these. The gradients of the others are then those of one part alone. 0 for all.
        scan: "chunked", or as mru-lm writes it, in PyTorch: "brent_kung", "hillis_steele" or "sequential", whose
            gradients come from the same scan of block matrices. These take neither `chunk_size` nor `context`.
        backend: "auto", "torch" or "triton".

    Returns:
        H shaped and typed like x; with `return_final_state` also the states, float32 (float64 for float64 inputs). The
        recurrence itself runs in that precision whatever the inputs are.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "matrix_product_scan"
    check_floating(op, x=x, initial_state=initial_state)
    if x.dim() != 5 or x.shape[-1] != x.shape[-2] or 0 in x.shape or x.shape[-1] not in ORDERS:
        allowed = ", ".join(map(str, ORDERS))
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}; expected (batch, seqlen, nheads, o, o), none of them 0 and o one of "
            f"{allowed}"
        )
    check_cu_seqlens(op, cu_seqlens, x.shape[0], x.shape[1], x, part=context is not None)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_state(op, initial_state, x, (rows, *x.shape[2:]))
    check_finite(op, x=x, initial_state=initial_state)
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(f"{op}: chunk_size is {chunk_size}; use None or a positive whole number")
    if reverse and context is not None:
        raise ValueError(f"{op}: reverse=True and a context; flip whole rows, before they are cut")
    check_choice(op, "scan", scan, SCANS)
    given = ProductInputs(x, initial_state, cu_seqlens, chunk_size, context_name(context), columns)
    if scan != "chunked":
        if chunk_size is not None or context is not None or backend == "triton":
            raise ValueError(
                f'{op}: scan={scan!r} with a chunk_size, a context or backend="triton"; only scan="chunked" takes these'
            )
        return run_product(partial(walked_product, scan=scan), given, return_final_state, reverse)
    return run_product(partial(_matrix_product, backend=backend), given, return_final_state, reverse)


def check_state(
    op: str, state: Tensor | None, like: Tensor, shape: tuple[int, ...], name: str = "initial_state"
) -> None:
    """A given state has its shape and the precision that states need: in bfloat16 a product of a thousand
    near-orthogonal matrices is off by 29 %."""
    if state is None:
        return
    check_shape(op, name, state, shape)
    wanted = working_dtype(like)
    if state.dtype not in (torch.float32, wanted):
        raise ValueError(f"{op}: {name} has dtype {state.dtype}; states are {wanted}: convert it with .float()")


def _like(given: ProductInputs, fused: bool) -> ProductOutputs:
    x, cu_seqlens = given.x, given.cu_seqlens
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = x.new_empty((rows, *x.shape[2:]), dtype=working_dtype(x))
    if fused:
        from matmix.kernels.matrix_product.fused import products_like as products_of_kernels

        products = products_of_kernels(given)
    else:
        products = products_like(x, given.chunk_size, given.context)
    entered = final.new_empty((x.shape[0], *x.shape[2:])) if given.context else None
    return ProductOutputs(torch.empty_like(x, memory_format=torch.contiguous_format), final, products, entered)


def _flops(given: ProductInputs, *, backward: bool) -> int:
    batch, seqlen, heads, order, _ = given.x
    return 2 * (3 if backward else 2) * batch * seqlen * heads * order**3


_matrix_product = register(MATRIX_PRODUCT, "matrix_product.fused", _like, flops=_flops)
