"""A state matrix of the MRU whose products cannot overflow and can forget: an affine map of rows."""

from __future__ import annotations

import torch

from matmix.kernels.functions import Function


class AffineMap(Function):
    """X = [[A, 0], [B, I]] with k = o // 2: A (k x k) is I + M_1, each row divided by the sum of its absolute values
    where that is above 1, and B = M_2, for elements M = [M_1; M_2] (o x k). Keeps M only.

    In a product the lower left block is S_t = S_{t-1} A_t + B_t: a memory whose rows every token may rotate, permute
    and let fade (A) and add to (B). No row of A spreads more than it is given, so that the absolute values in a row of
    S sum to at most those of the B so far: states grow linearly at worst, whatever the elements and the length.
    """

    @staticmethod
    def factors(elements: torch.Tensor, order: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A, B, and the sizes (..., k, 1) that the rows of I + M_1 were divided by, 1 and above."""
        k = order // 2
        upper, lower = elements.unflatten(-1, (order, k)).split([k, order - k], dim=-2)
        rows = upper + torch.eye(k, dtype=elements.dtype, device=elements.device)
        sizes = rows.abs().sum(-1, keepdim=True).clamp(min=1)
        return rows / sizes, lower, sizes

    @staticmethod
    def forward(elements: torch.Tensor, order: int) -> torch.Tensor:
        a, b, _ = AffineMap.factors(elements, order)
        k = order // 2
        x = elements.new_zeros(*elements.shape[:-1], order, order)
        x[..., :k, :k], x[..., k:, :k] = a, b
        x.diagonal(dim1=-2, dim2=-1)[..., k:] = 1
        return x

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AffineMap.gradient(ctx.saved_tensors[0], grad), None

    @staticmethod
    def gradient(elements: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the elements from that of X."""
        order = grad.shape[-1]
        a, _, sizes = AffineMap.factors(elements, order)
        of_a, of_b = grad[..., : order // 2].split([order // 2, order - order // 2], dim=-2)
        along = (of_a * a).sum(-1, keepdim=True) * (sizes > 1)
        return torch.cat([(of_a - a.sign() * along) / sizes, of_b], dim=-2).flatten(-2)
