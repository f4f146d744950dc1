"""The matrix-product scan (MRU) as an op: checks, backend choice, registration with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation, takes_triton
from matmix.kernels.checks import check_cu_seqlens, check_finite, check_floating, check_shape
from matmix.kernels.matrix_product.backward import product_backward
from matmix.kernels.matrix_product.chunked import reverse_products
from matmix.kernels.matrix_product.forward import product_forward
from matmix.kernels.matrix_product.spans import ORDERS, products_like


def matrix_product_scan(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Running products of matrices, H_t = H_{t-1} X_t, in every head: the core of the MRU.

    Args:
        x: (batch, seqlen, nheads, o, o), o one of 4, 8, 16, 32.
        initial_state: H_0, (batch, nheads, o, o) float32, or (documents, ...) with `cu_seqlens`; None for the
            identity.
        return_final_state: also return the state after the last token (of each document).
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1); the product
            starts anew at each. On an accelerator the PyTorch form reads them back to the host; the Triton form,
            which "auto" takes there, does not.
        reverse: run from the last token to the first, H_t = H_{t+1} X_t; the final state is then the first
            token's.
        chunk_size: steps per chunk of the PyTorch form, any positive number; None lets it choose. The Triton form has
            its own.
        backend: "auto", "torch" or "triton".

    Returns:
        H shaped and typed like x; with `return_final_state` also the states, float32 (float64 for float64
        inputs). The recurrence itself runs in that precision whatever the inputs are.

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
    check_cu_seqlens(op, cu_seqlens, x.shape[0], x.shape[1], x)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_state(op, initial_state, x, (rows, *x.shape[2:]))
    check_finite(op, x=x, initial_state=initial_state)
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(f"{op}: chunk_size is {chunk_size}; use None or a positive whole number")
    check_backend(op, backend, x)
    x, initial_state, cu_seqlens = reverse_products(x, initial_state, cu_seqlens, reverse)
    h, final, _ = torch.ops.matmix.matrix_product_scan(x, initial_state, cu_seqlens, chunk_size, backend)
    if reverse:
        h = h.flip(1)
        final = final if cu_seqlens is None else final.flip(0)
    return (h, final) if return_final_state else h


def check_state(
    op: str, state: Tensor | None, like: Tensor, shape: tuple[int, ...], name: str = "initial_state"
) -> None:
    """A given state has its shape and the precision that states need: in bfloat16 a product of a thousand
    near-orthogonal matrices is off by 29 %."""
    if state is None:
        return
    check_shape(op, name, state, shape)
    wanted = torch.promote_types(like.dtype, torch.float32)
    if state.dtype not in (torch.float32, wanted):
        raise ValueError(f"{op}: {name} has dtype {state.dtype}; states are {wanted}: convert it with .float()")


@torch.library.custom_op("matmix::matrix_product_scan", mutates_args=())
def _matrix_product(
    x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    run = implementation("matrix_product_scan", "forward", product_forward, backend, x)
    return run(x, initial_state, cu_seqlens, chunk_size)


@_matrix_product.register_fake
def _(x, initial_state, cu_seqlens, chunk_size, backend):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = x.new_empty((rows, *x.shape[2:]), dtype=dtype)
    if takes_triton(backend, x):
        from matmix.kernels.matrix_product.fused import products_like as products_of_kernels

        products = products_of_kernels(x, cu_seqlens)
    else:
        products = products_like(x, chunk_size)
    return torch.empty_like(x, memory_format=torch.contiguous_format), final, products


@torch.library.custom_op("matmix::matrix_product_scan_backward", mutates_args=())
def _matrix_product_backward(
    dh: Tensor | None,
    dfinal: Tensor | None,
    x: Tensor,
    h: Tensor,
    products: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    run = implementation("matrix_product_scan", "backward", product_backward, backend, x)
    dx, dinitial = run(dh, dfinal, x, h, products, initial_state, cu_seqlens, chunk_size)
    return dx, x.new_empty(0) if dinitial is None else dinitial


@_matrix_product_backward.register_fake
def _(dh, dfinal, x, h, products, initial_state, cu_seqlens, chunk_size, backend):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(0) if initial_state is None else torch.empty_like(initial_state)


def _setup(ctx, inputs, output):
    x, initial_state, cu_seqlens, ctx.chunk_size, ctx.backend = inputs
    h, _, products = output
    ctx.save_for_backward(x, h, products, initial_state, cu_seqlens)
    ctx.mark_non_differentiable(products)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dh, dfinal, _):
    x, h, products, initial_state, cu_seqlens = ctx.saved_tensors
    dx, dinitial = torch.ops.matmix.matrix_product_scan_backward(
        dh, dfinal, x, h, products, initial_state, cu_seqlens, ctx.chunk_size, ctx.backend
    )
    return dx, None if initial_state is None else dinitial, None, None, None


_matrix_product.register_autograd(_gradient, setup_context=_setup)


@register_flop_formula(torch.ops.matmix.matrix_product_scan)
def _(x_shape, *args, **kwargs) -> int:
    batch, seqlen, heads, order, _ = x_shape
    return 2 * 2 * batch * seqlen * heads * order**3


@register_flop_formula(torch.ops.matmix.matrix_product_scan_backward)
def _(dh_shape, dfinal_shape, x_shape, *args, **kwargs) -> int:
    batch, seqlen, heads, order, _ = x_shape
    return 2 * 3 * batch * seqlen * heads * order**3
