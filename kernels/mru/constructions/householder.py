"""An orthogonal state matrix of the MRU as a product of Householder reflections."""

from __future__ import annotations

import torch

from matmix.kernels.functions import Function


class ReflectionProduct(Function):
    """X = -H_1 H_2 ... H_o with H_k = I - 2 v_k v_k^T / |v_k|^2; keeps its input and X.

    v_k = e_k + elements below it, as LAPACK keeps them: the elements are the columns of the strictly lower triangle,
    given row by row like the Cayley transform's. No v_k can be 0, and all v_k = e_k give -I, hence the sign.
    H_k leaves rows and columns before k alone, so that the products only ever touch the trailing block.
    """

    @staticmethod
    def forward(elements: torch.Tensor, order: int) -> torch.Tensor:
        vectors, rates = ReflectionProduct.vectors(elements, order)
        x = vectors.new_zeros(order, order, vectors.shape[-1])
        x.diagonal().fill_(1)
        for k in reversed(range(order)):
            ReflectionProduct.reflect(x[k:, k:], vectors[k:, k], rates[k])
        return x.neg_().permute(2, 0, 1).contiguous().view(*elements.shape[:-1], order, order)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def vectors(elements: torch.Tensor, order: int) -> tuple[torch.Tensor, torch.Tensor]:
        """v (order, order, tokens), one a column, and 2 / |v|^2 (order, tokens); tokens are the fastest dimension."""
        flat = elements.reshape(-1, elements.shape[-1]).mT
        vectors = flat.new_zeros(order, order, flat.shape[1])
        rows, columns = torch.tril_indices(order, order, -1, device=elements.device)
        vectors[rows, columns] = flat
        vectors.diagonal().fill_(1)
        return vectors, 2 / vectors.square().sum(0)

    @staticmethod
    def reflect(block: torch.Tensor, vector: torch.Tensor, rate: torch.Tensor) -> None:
        """block (n, m, tokens) -= rate v (v^T block), in place."""
        row = (vector.unsqueeze(1) * block).sum(0).mul_(rate)
        block.addcmul_(vector.unsqueeze(1), row.unsqueeze(0), value=-1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # With K = G X^T - X G^T, skew, the gradient of v_1 is 2 K v_1 / |v_1|^2 =: y, and H_1 K H_1 = K + v y^T - y v^T
        # is the K of the product without H_1.
        elements, x = ctx.saved_tensors
        order = x.shape[-1]
        vectors, rates = ReflectionProduct.vectors(elements, order)
        skew = (grad @ x.mT).view(-1, order, order).permute(1, 2, 0).contiguous()
        skew = skew - skew.transpose(0, 1)
        grad_vectors = skew.new_zeros(vectors.shape)
        for k in range(order - 1):
            v = vectors[k:, k]
            y = (skew * v).sum(1) * rates[k]
            grad_vectors[k:, k] = y
            # Not in place: the sum above keeps K where it is to be differentiated again. Row and column k are done.
            skew = torch.addcmul(skew[1:, 1:], v[1:].unsqueeze(1), y[1:].unsqueeze(0))
            skew.addcmul_(y[1:].unsqueeze(1), v[1:].unsqueeze(0), value=-1)
        rows, columns = torch.tril_indices(order, order, -1, device=x.device)
        return grad_vectors[rows, columns].mT.reshape(elements.shape), None
