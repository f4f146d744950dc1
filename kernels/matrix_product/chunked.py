"""Matrix-product scan in chunks, in PyTorch, with a hand-written backward pass.

H_t = H_{t-1} X_t is sequential in t, and multiplying o x o matrices one at a time is slow. Cutting the
sequence into chunks makes (batch x chunks x heads) independent lanes. All chunks at once multiply their
matrices one after the other into products P_t since the chunk's start; a short scan over the chunks' whole
products gives the state E that enters each. Then H_t = E P_t no longer waits for H_{t-1}: the P_t of several
steps lie side by side in memory, and E [P_1 | P_2 | ...] is one wide product, far cheaper than one each.

The backward pass is B_t = G_t + B_{t+1} X_{t+1}^T, dX_t = H_{t-1}^T B_t. What a chunk sends to the one on its
left is the sum of G_t P_t^T, wide products again, plus what it gets from its right times its whole product.
With that known at every chunk, the recurrence runs in all of them at once. Kept for it are the input, the
output and the P_t, float32. A packed document restarts the product: its first state is written over whatever
reached it and the states after it are the P_t as they are, so nothing of its neighbour, not even an overflow,
comes through.

Matrices of order 16 and more gain nothing from lying side by side and would only be moved about more. For them
both second passes run the recurrence in all chunks at once, and only each chunk's product is kept.
"""

from __future__ import annotations

from torch import Tensor

from matmix.kernels.functions import Function, gradient_of
from matmix.kernels.matrix_product.backward import product_backward
from matmix.kernels.matrix_product.forward import product_forward


class MatrixProductFunction(Function):
    @staticmethod
    def forward(x, initial_state, cu_seqlens, chunk_size):
        return product_forward(x, initial_state, cu_seqlens, chunk_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, initial_state, cu_seqlens, ctx.chunk_size = inputs
        h, _, products = output
        ctx.save_for_backward(x, h, products, initial_state, cu_seqlens)
        ctx.mark_non_differentiable(products)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dh, dfinal, _):
        return *gradient_of(product_backward, dh, dfinal, *ctx.saved_tensors, ctx.chunk_size), None, None


def matrix_product_chunked(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`matrix_product_scan` in PyTorch, without argument checks; see there."""
    x, initial_state, cu_seqlens = reverse_products(x, initial_state, cu_seqlens, reverse)
    h, final, _ = MatrixProductFunction.apply(x, initial_state, cu_seqlens, chunk_size)
    if reverse:
        h = h.flip(1)
        final = final if cu_seqlens is None else final.flip(0)
    return (h, final) if return_final_state else h


def reverse_products(
    x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The inputs whose forward scan, read backwards, is the scan from the right."""
    if not reverse:
        return x, initial_state, cu_seqlens
    if cu_seqlens is None:
        return x.flip(1), initial_state, None
    flipped = None if initial_state is None else initial_state.flip(0)
    return x.flip(1), flipped, x.shape[1] - cu_seqlens.flip(0)
