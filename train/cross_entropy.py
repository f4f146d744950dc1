"""Cross-entropy of a linear readout without float32 logits for the whole batch.

On CUDA this is Liger's fused kernel; elsewhere the rows are taken in chunks whose logits are dropped as soon as their
gradient is known (the gradient of a sum is linear in the incoming scalar, so it can be formed in the forward pass).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
_CHUNK_BYTES = 32 * 2**20  # float32 logits alive at once on CPU; larger chunks were not faster, smaller ones were


class CrossEntropy(NamedTuple):
    """Sums over the rows with a target. `total` carries the gradient; the others are for reporting."""

    total: Tensor  # cross-entropy + z_loss * squared log-partition, float32 scalar
    loss: Tensor  # cross-entropy alone
    correct: Tensor  # rows whose most likely class is the target


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, weight, bias, targets, z_loss):
        rows, vocab = features.shape[0], weight.shape[0]
        wants = any(ctx.needs_input_grad[:3])
        grad_features = torch.empty_like(features) if wants else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants and bias is not None else None
        total, loss, correct = (features.new_zeros((), dtype=torch.float32) for _ in range(3))
        step = max(1, _CHUNK_BYTES // (4 * vocab))
        for start in range(0, rows, step):
            chunk, target = features[start : start + step], targets[start : start + step]
            kept = target != IGNORED
            logits = torch.nn.functional.linear(chunk, weight, bias).float()
            partition = torch.logsumexp(logits, dim=1)
            index = target.clamp(min=0)[:, None]
            row_loss = (partition - logits.gather(1, index)[:, 0]) * kept
            loss += row_loss.sum()
            total += row_loss.sum() + z_loss * (partition.square() * kept).sum()
            correct += ((logits.argmax(dim=1) == target) & kept).sum()
            if wants:
                grad = logits.sub_(partition[:, None]).exp_()
                if z_loss:
                    grad *= (1 + 2 * z_loss * partition)[:, None]
                grad.scatter_add_(1, index, grad.new_full(index.shape, -1.0))
                grad *= kept[:, None]
                low = grad.to(weight.dtype)
                grad_features[start : start + step] = low @ weight
                grad_weight += low.t() @ chunk.to(weight.dtype)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        ctx.save_for_backward(grad_features, grad_weight, grad_bias)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(loss, correct)
        return total, loss, correct

    @staticmethod
    def backward(ctx, grad, _grad_loss, _grad_correct):
        features, weight, bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            (features * grad).to(features.dtype),
            (weight * grad).to(weight_dtype),
            None if bias is None else (bias * grad).to(bias_dtype),
            None,
            None,
        )


def linear_cross_entropy(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, z_loss: float = 0.0
) -> CrossEntropy:
    """Sums of the cross-entropy of ``features @ weight.T + bias``.

    features (n, d_model); weight (vocab, d_model); bias (vocab,) or None; targets (n,) int64, -100 = no target.
    """
    if features.shape[0] == 0:
        # A rank without a masked token still takes part in every collective of the backward pass.
        zero = features.sum() * 0 + weight.sum() * 0 + (0 if bias is None else bias.sum() * 0)
        zero = zero.float()
        return CrossEntropy(zero, zero.detach(), zero.detach())
    if features.is_cuda:
        return _fused(features, weight, bias, targets, z_loss)
    return chunked_linear_cross_entropy(features, weight, bias, targets, z_loss=z_loss)


def chunked_linear_cross_entropy(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, z_loss: float = 0.0
) -> CrossEntropy:
    """`linear_cross_entropy` in PyTorch alone, on any device; n > 0."""
    return CrossEntropy(*_ChunkedLinearCrossEntropy.apply(features, weight, bias, targets, z_loss))


def _fused(features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, z_loss: float) -> CrossEntropy:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # imports Triton: CUDA only

    output = liger_fused_linear_cross_entropy(
        features,
        weight.to(features.dtype),
        targets,
        bias=None if bias is None else bias.to(features.dtype),
        ignore_index=IGNORED,
        lse_square_scale=z_loss,
        reduction="sum",
        return_z_loss=True,
        accum_dtype=torch.float32,
        return_token_accuracy=True,
    )
    count = (targets != IGNORED).sum()
    loss = (output.loss - output.z_loss).detach().float()
    # The kernel reports accuracy as a mean over the rows that have a target; without any it is 0/0.
    correct = torch.where(count > 0, output.token_accuracy.detach().float() * count, 0.0)
    return CrossEntropy(output.loss.float(), loss, correct)
