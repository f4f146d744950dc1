"""The matrix-product scan as mru-lm writes it: Brent and Kung's scan, Hillis and Steele's, and the recurrence, each
also for the backward pass.

The gradient of X_i is A_i B_i with A_i = H_{i-1}^T and B_i = G_i + B_{i+1} X_{i+1}^T. B is the lower left block of
products of [[X_{i+1}^T, 0], [G_i, I]], which the same scan multiplies up from the last token to the first. As the upper
right block of all of them is 0, only two of four blocks are kept. The input and the states are all that is stored.
"""

import torch
from torch import Tensor

from matmix.kernels.functions import Function, gradient_of, outside_autocast, working
from matmix.kernels.matrix_product.chunked import ProductInputs, ProductOutputs, given_states

Walk = list[tuple[slice, slice, bool]]
"""The steps of a scan: elements at `left` are multiplied from the left to those at `right`, all at once; the flag says
whether those at `left` are products from the first element on."""


def brent_kung(length: int) -> Walk:
    """Brent and Kung, 1982: up a binary tree and down again, 2 length products in 2 log2(length) steps."""
    walk, step = [], 1
    while step < length:
        walk.append((slice(step - 1, length - step, 2 * step), slice(2 * step - 1, length, 2 * step), False))
        step *= 2
    while step > 1:
        step //= 2
        if 3 * step - 1 < length:
            walk.append((slice(2 * step - 1, length - step, 2 * step), slice(3 * step - 1, length, 2 * step), True))
    return walk


def hillis_steele(length: int) -> Walk:
    """Hillis and Steele, 1986: every element takes the one `step` before it, for step 1, 2, 4 ...: length log2(length)
    products in log2(length) steps."""
    steps = (1 << level for level in range((length - 1).bit_length()))
    return [(slice(0, length - step), slice(step, length), False) for step in steps]


def sequential(length: int) -> Walk:
    """The recurrence: length products in as many steps."""
    return [(slice(t - 1, t), slice(t, t + 1), True) for t in range(1, length)]


WALKS = {"brent_kung": brent_kung, "hillis_steele": hillis_steele, "sequential": sequential}
"""Scans by name, besides the one in chunks."""

SCANS = ("chunked", *WALKS)


class WalkedProduct(Function):
    """H_t = H_{t-1} X_t, (batch, nheads, seqlen, o, o), by the scan of that name; it begins anew at `firsts`, bool
    (seqlen,), or nowhere."""

    @staticmethod
    @outside_autocast
    def forward(x: Tensor, firsts: Tensor | None, scan: str) -> Tensor:
        h = x.clone(memory_format=torch.contiguous_format)
        closed = None if firsts is None else firsts.view(-1, 1, 1).clone()
        for left, right, _ in WALKS[scan](x.shape[-3]):
            products = h[..., left, :, :] @ h[..., right, :, :]
            if closed is not None:
                # Not by a product with zeros: a document before may have overflowed.
                products = torch.where(closed[right], h[..., right, :, :], products)
                closed[right] = closed[right] | closed[left]
            h[..., right, :, :] = products
        return h

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        x, firsts, ctx.scan = inputs
        ctx.save_for_backward(x, firsts, output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, grad, ctx.scan)
        if torch.compiler.is_compiling():  # which takes no function made on the way
            return WalkedProduct.gradient(*given)
        return gradient_of(WalkedProduct.gradient, *given)

    @staticmethod
    @outside_autocast
    def gradient(x: Tensor, firsts: Tensor | None, h: Tensor, grad: Tensor, scan: str) -> tuple[Tensor | None, ...]:
        # From the last token to the first; what would come before it is zeros.
        turned = torch.zeros_like(x, memory_format=torch.contiguous_format)
        turned[..., 1:, :, :] = x[..., 1:, :, :].flip(-3).mT
        b, closed = grad.flip(-3).contiguous(), None
        if firsts is not None:
            closed = firsts.roll(-1).flip(0).view(-1, 1, 1)
        for left, right, complete in WALKS[scan](x.shape[-3]):
            sums = b[..., right, :, :] + b[..., left, :, :] @ turned[..., right, :, :]
            if closed is not None:
                sums = torch.where(closed[right], b[..., right, :, :], sums)
                closed[right] = closed[right] | closed[left]
            b[..., right, :, :] = sums
            if not complete:
                turned[..., right, :, :] = turned[..., left, :, :] @ turned[..., right, :, :]
        dx = b.flip(-3)
        later = h[..., :-1, :, :].mT @ dx[..., 1:, :, :]
        if firsts is not None:
            later = torch.where(firsts[1:].view(-1, 1, 1), dx[..., 1:, :, :], later)
        dx[..., 1:, :, :] = later
        return dx, None, None


@outside_autocast
def walked_product(given: ProductInputs, scan: str) -> ProductOutputs:
    """`matrix_product_scan` by one of `WALKS`, differentiable. Initial states are multiplied to the first matrices."""
    x, initial_state, cu_seqlens = working(given.x), given.initial_state, given.cu_seqlens
    if cu_seqlens is None:
        if initial_state is not None:
            x = torch.cat([given_states(initial_state, len(x), x).unsqueeze(1) @ x[:, :1], x[:, 1:]], 1)
        h = WalkedProduct.apply(x.transpose(1, 2), None, scan).transpose(1, 2)
        final = h[:, -1]
    else:
        # Nothing waits for the device: documents without tokens write behind the row.
        begins, ends, seqlen = cu_seqlens[:-1].long(), cu_seqlens[1:].long(), x.shape[1]
        empty, starts = begins == ends, given_states(initial_state, len(begins), x)
        begins = begins.masked_fill(empty, seqlen)
        if initial_state is not None:
            longer = torch.cat([x, x[:, :1]], 1)
            x = longer.index_copy(1, begins, (starts @ longer[0, begins]).unsqueeze(0))[:, :-1]
        firsts = torch.zeros(seqlen + 1, dtype=torch.bool, device=x.device).index_fill(0, begins, True)[:-1]
        h = WalkedProduct.apply(x.transpose(1, 2), firsts, scan).transpose(1, 2)
        final = torch.where(empty.view(-1, 1, 1, 1), starts, h[0, (ends - 1).clamp(min=0)])
    return ProductOutputs(h.to(given.x.dtype).contiguous(), final.contiguous(), h.new_empty(0), None)
