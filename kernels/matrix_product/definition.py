"""The definition of the matrix-product scan in float64, with which the fast forms are compared."""

import itertools

import torch
from torch import Tensor


def matrix_product_definition(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """H_t = H_{t-1} X_t, token by token; arguments as in `matmix.kernels.matrix_product_scan`."""
    x = x.to(torch.float64)
    batch, seqlen, heads, order, _ = x.shape
    bounds = [0, seqlen] if cu_seqlens is None else cu_seqlens.tolist()
    outputs: list[Tensor] = []
    finals = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        if initial_state is None:
            h = torch.eye(order, dtype=x.dtype, device=x.device).expand(batch, heads, order, order)
        else:
            h = initial_state.to(x.dtype)
            h = h if cu_seqlens is None else h[number : number + 1]
        rows = []
        for t in reversed(range(start, end)) if reverse else range(start, end):
            h = h @ x[:, t]
            rows.append(h)
        outputs += rows[::-1] if reverse else rows
        finals.append(h)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(x)
    return (y, torch.cat(finals)) if return_final_state else y
