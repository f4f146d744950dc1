"""What our ops are measured against: the same results by other algorithms, written from their definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def recurrent_quasiseparable(
    v: Tensor,
    qf: Tensor,
    kf: Tensor,
    qb: Tensor,
    kb: Tensor,
    af: Tensor,
    ab: Tensor,
    wf: Tensor,
    wb: Tensor,
    d: Tensor,
) -> Tensor:
    """Hydra's mixer as two plain recurrences over tokens, differentiated by autograd. Shapes as in our op."""

    def scan(q: Tensor, k: Tensor, a: Tensor, w: Tensor, order: range) -> Tensor:
        h = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
        reads = []
        for t in order:
            # The shift: a token reads what its neighbour would have read, without its own input.
            reads.append(h)
            h = torch.exp(a[:, t, :, None, None]) * h + (w[:, t, :, None] * k[:, t])[..., None] * v[:, t, :, None]
        return [(q[:, s, :, None] @ h).squeeze(-2) for s, h in zip([order[0], *order[:-1]], reads, strict=True)]

    forward = torch.stack(scan(qf, kf, af, wf, range(v.shape[1])), 1)
    backward = torch.stack(scan(qb, kb, ab, wb, range(v.shape[1] - 1, -1, -1))[::-1], 1)
    return forward + backward + d[..., None] * v


def recurrent_product(x: Tensor) -> Tensor:
    """H_t = H_{t-1} X_t as a loop over tokens, differentiated by autograd: (..., seqlen, o, o)."""
    h, states = None, []
    for matrix in x.unbind(-3):
        h = matrix if h is None else h @ matrix
        states.append(h)
    return torch.stack(states, -3)


Combine = Callable[[slice, slice], None]
"""`combine(left, right)` puts the elements at `left` before those at `right`, in place."""


def brent_kung(combine: Combine, length: int) -> None:
    """Inclusive scan in place (Brent and Kung, 1982): up a binary tree and down again, 2 length operations in
    2 log2(length) steps."""
    step = 1
    while step < length:
        combine(slice(step - 1, length - step, 2 * step), slice(2 * step - 1, length, 2 * step))
        step *= 2
    step //= 2
    while step >= 1:
        if 3 * step - 1 < length:
            combine(slice(2 * step - 1, length - step, 2 * step), slice(3 * step - 1, length, 2 * step))
        step //= 2


def hillis_steele(combine: Combine, length: int) -> None:
    """Inclusive scan in place (Hillis and Steele, 1986): every element takes the one `step` before it, for step 1, 2,
    4 ...: length log2(length) operations in log2(length) steps."""
    step = 1
    while step < length:
        combine(slice(0, length - step), slice(step, length))
        step *= 2


Walk = Callable[[Combine, int], None]
"""The order in which a scan combines elements: one of the two above. The right-hand side of an assignment is complete
before anything is written, so that they may overlap."""


def _products(x: Tensor, walk: Walk) -> Tensor:
    """The running products of x (..., seqlen, o, o), one batched matmul per level."""
    h = x.clone()

    def combine(left: slice, right: slice) -> None:
        h[..., right, :, :] = h[..., left, :, :] @ h[..., right, :, :]

    walk(combine, x.shape[-3])
    return h


def _product_gradient(x: Tensor, h: Tensor, g: Tensor, walk: Walk) -> Tensor:
    """dX_t = H_{t-1}^T B_t, where B_t = G_t + B_{t+1} X_{t+1}^T is the same scan over pairs, from the right."""
    # Reversed in time: pairs (A, B) with A_t = X_{t+1}^T, and (A, B) . (A', B') = (A A', B A' + B').
    a = torch.empty_like(x)
    a[..., 1:, :, :] = x.flip(-3)[..., :-1, :, :].mT
    a[..., 0, :, :] = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    b = g.flip(-3)

    def combine(left: slice, right: slice) -> None:
        b[..., right, :, :] += b[..., left, :, :] @ a[..., right, :, :]
        a[..., right, :, :] = a[..., left, :, :] @ a[..., right, :, :]

    walk(combine, x.shape[-3])
    dx = b.flip(-3)
    dx[..., 1:, :, :] = h[..., :-1, :, :].mT @ dx[..., 1:, :, :]
    return dx


class BrentKungProduct(torch.autograd.Function):
    """H_t = H_{t-1} X_t by Brent and Kung's scan, x (batch, heads, seqlen, o, o); keeps x and H."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        h = _products(x, brent_kung)
        ctx.save_for_backward(x, h)
        return h

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return _product_gradient(*ctx.saved_tensors, g, brent_kung)


class HillisSteeleProduct(torch.autograd.Function):
    """H_t = H_{t-1} X_t by Hillis and Steele's scan, x (batch, heads, seqlen, o, o); keeps x and H."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        h = _products(x, hillis_steele)
        ctx.save_for_backward(x, h)
        return h

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return _product_gradient(*ctx.saved_tensors, g, hillis_steele)
