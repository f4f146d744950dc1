"""What our ops are measured against: the same results by other algorithms, written from their definitions."""

from __future__ import annotations

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


def _brent_kung(combine, length: int) -> None:
    """Inclusive scan in place: `combine(left, right)` folds the elements at `left` into those at `right`."""
    step = 1
    while step < length:
        combine(slice(step - 1, length - step, 2 * step), slice(2 * step - 1, length, 2 * step))
        step *= 2
    step //= 2
    while step >= 1:
        if 3 * step - 1 < length:
            combine(slice(2 * step - 1, length - step, 2 * step), slice(3 * step - 1, length, 2 * step))
        step //= 2


class BrentKungProduct(torch.autograd.Function):
    """H_t = H_{t-1} X_t by Brent and Kung's scan, in place, one batched matmul per level.

    x is (batch, heads, seqlen, o, o).

    The backward recurrence B_t = G_t + B_{t+1} X_{t+1}^T is the same scan over pairs, from the right.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        h = x.clone()

        def combine(left: slice, right: slice) -> None:
            h[:, :, right] = h[:, :, left] @ h[:, :, right]

        _brent_kung(combine, x.shape[2])
        ctx.save_for_backward(x, h)
        return h

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        x, h = ctx.saved_tensors
        # Reversed in time: pairs (A, B) with A_t = X_{t+1}^T, and (A, B) . (A', B') = (A A', B A' + B').
        a = torch.empty_like(x)
        a[:, :, 1:] = x.flip(2)[:, :, :-1].mT
        a[:, :, 0] = torch.eye(x.shape[-1], dtype=x.dtype)
        b = g.flip(2)

        def combine(left: slice, right: slice) -> None:
            b[:, :, right] += b[:, :, left] @ a[:, :, right]
            a[:, :, right] = a[:, :, left] @ a[:, :, right]

        _brent_kung(combine, x.shape[2])
        b = b.flip(2)
        dx = torch.empty_like(x)
        dx[:, :, 0] = b[:, :, 0]
        torch.matmul(h[:, :, :-1].mT, b[:, :, 1:], out=dx[:, :, 1:])
        return dx
