"""Cross-entropy of a linear readout without float32 logits for the whole batch.

On CUDA this is Liger's fused kernel; elsewhere the rows are taken in chunks whose logits are dropped as soon as their
gradient is known (the gradient of a sum is linear in the incoming scalar, so it can be formed in the forward pass).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matmix.data.loading.masking import IGNORED

_CHUNK_BYTES = 32 * 2**20  # float32 logits alive at once on CPU; larger chunks were not faster, smaller ones were


class CrossEntropy(NamedTuple):
    """Sums over the rows with a target. `total` carries the gradient; the others are for reporting."""

    total: Tensor  # cross-entropy + z_loss * squared log-partition, float32 scalar
    loss: Tensor  # cross-entropy alone
    correct: Tensor  # rows whose most likely class is the target


class _Chunk(NamedTuple):
    """Some of the rows, with their float32 logits (rows, vocab)."""

    rows: slice
    kept: Tensor  # which of them have a target, or what those that have one weigh
    index: Tensor  # (rows, 1), the target, 0 where there is none
    logits: Tensor
    partition: Tensor
    loss: Tensor  # 0 without a target, as is `correct`
    correct: Tensor


def _chunks(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor | None, softcap: float
) -> Iterator[_Chunk]:
    step = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
    for start in range(0, features.shape[0], step):
        rows = slice(start, start + step)
        target = targets[rows]
        kept, index = target != IGNORED, target.clamp(min=0)[:, None]
        kept = kept if weights is None else kept * weights[rows]
        logits = torch.nn.functional.linear(features[rows], weight, bias).float()
        if softcap:
            logits = logits.div(softcap).tanh_().mul_(softcap)
        partition = torch.logsumexp(logits, dim=1)
        loss = (partition - logits.gather(1, index)[:, 0]) * kept
        yield _Chunk(rows, kept, index, logits, partition, loss, (logits.argmax(dim=1) == target) * kept)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, weight, bias, targets, weights, z_loss, softcap):
        wants = any(ctx.needs_input_grad[:3])
        grad_features = torch.empty_like(features) if wants else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants and bias is not None else None
        total, loss, correct = (features.new_zeros((), dtype=torch.float32) for _ in range(3))
        for chunk in _chunks(features, weight, bias, targets, weights, softcap):
            loss += chunk.loss.sum()
            total += chunk.loss.sum() + z_loss * (chunk.partition.square() * chunk.kept).sum()
            correct += chunk.correct.sum()
            if wants:
                slope = 1 - (chunk.logits / softcap).square() if softcap else None
                grad = chunk.logits.sub_(chunk.partition[:, None]).exp_()
                if z_loss:
                    grad *= (1 + 2 * z_loss * chunk.partition)[:, None]
                grad.scatter_add_(1, chunk.index, grad.new_full(chunk.index.shape, -1.0))
                grad *= chunk.kept[:, None]
                if slope is not None:
                    grad *= slope
                low = grad.to(weight.dtype)
                grad_features[chunk.rows] = low @ weight
                grad_weight += low.t() @ features[chunk.rows].to(weight.dtype)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        ctx.save_for_backward(grad_features, grad_weight, grad_bias)
        ctx.mark_non_differentiable(loss, correct)
        return total, loss, correct

    @staticmethod
    def backward(ctx, grad, _grad_loss, _grad_correct):
        features, weight, bias = ctx.saved_tensors
        # float32 also of bfloat16 weights, where that is what their gradients are kept in; else autograd rounds it.
        bias = None if bias is None else bias * grad
        return (features * grad).to(features.dtype), weight * grad, bias, None, None, None, None


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    fused: bool = True,
) -> CrossEntropy:
    """Sums of the cross-entropy of ``features @ weight.T + bias``, capped to softcap tanh(logits / softcap) if that is
    not 0.

    features (n, d_model); weight (vocab, d_model); bias (vocab,) or None; targets (n,) int64, -100 = no target;
    weights (n,) float32 or None: by what the rows are multiplied in all sums. fused: by Liger's kernel on CUDA, which
    waits for the device and knows no weights.
    """
    if features.shape[0] == 0:
        # A rank without a masked token still takes part in every collective of the backward pass.
        zero = (features.sum() * 0 + weight.sum() * 0 + (0 if bias is None else bias.sum() * 0)).float()
        return CrossEntropy(zero, zero.detach(), zero.detach())
    if features.is_cuda and fused and weights is None:
        return _fused(features, weight, bias, targets, z_loss, softcap)
    return CrossEntropy(*_ChunkedLinearCrossEntropy.apply(features, weight, bias, targets, weights, z_loss, softcap))


@torch.no_grad()
def row_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns for each row its cross-entropy in nats and whether the most likely class is the target, both times its
    weight: float32 (n,), without gradients, 0 where there is no target. Arguments as of `linear_cross_entropy`."""
    if features.is_cuda and features.shape[0] and weights is None:
        output = _liger(features, weight, bias, targets, softcap, reduction="none")
        return output.loss.float(), output.token_accuracy.float()
    loss, correct = features.new_zeros(2, features.shape[0], dtype=torch.float32)
    for chunk in _chunks(features, weight, bias, targets, weights, softcap):
        loss[chunk.rows], correct[chunk.rows] = chunk.loss, chunk.correct.float()
    return loss, correct


def _fused(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, z_loss: float, softcap: float
) -> CrossEntropy:
    options = {"lse_square_scale": z_loss, "return_z_loss": True, "accum_dtype": torch.float32}
    output = _liger(features, weight, bias, targets, softcap, reduction="sum", **options)
    count = (targets != IGNORED).sum()
    loss = (output.loss - output.z_loss).detach().float()
    # The kernel reports accuracy as a mean over the rows that have a target; without any it is 0/0.
    correct = torch.where(count > 0, output.token_accuracy.detach().float() * count, 0.0)
    return CrossEntropy(output.loss.float(), loss, correct)


def _liger(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: float, **options: Any
) -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # imports Triton: CUDA only

    weight, bias = weight.to(features.dtype), None if bias is None else bias.to(features.dtype)
    options |= {"bias": bias, "ignore_index": IGNORED, "return_token_accuracy": True, "softcap": softcap or None}
    return liger_fused_linear_cross_entropy(features, weight, targets, **options)
