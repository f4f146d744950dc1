"""Objectives: a batch and a model in, sums and counts out.

Sums instead of means keep gradient accumulation, packing, masking and uneven ranks exact: the loop divides by the
number of targets of the whole global batch, wherever its pieces were computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from matmix.data.loading.batch import Batch
from matmix.train.config import ObjectiveConfig
from matmix.train.tasks.cross_entropy import IGNORED, RowCrossEntropy, linear_cross_entropy, row_cross_entropy


class Loss(NamedTuple):
    """`total` is differentiable and includes regularisers; `loss` and `correct` are plain sums over targets."""

    total: Tensor
    loss: Tensor
    correct: Tensor


def count_targets(batch: Batch) -> int:
    """Number of positions of a micro-batch that have a target (computed on the host)."""
    return batch.select.numel() if batch.select is not None else int((batch.labels != IGNORED).sum())


def compute_loss(model: nn.Module, batch: Batch, config: ObjectiveConfig) -> Loss:
    """Cross-entropy sums of one micro-batch, for causal and masked language modelling alike.

    Labels come aligned with the position that predicts them. Masked batches carry `select`, the flat positions with a
    label, so that the head runs on those only.
    """
    targets = _targets(batch)

    def readout(features: Tensor, weight: Tensor, bias: Tensor | None):
        return linear_cross_entropy(features, weight, bias, targets, z_loss=config.z_loss)

    # Unpacked by position: some engines hand a named tuple back as a plain one.
    total, loss, correct = _run(model, batch, readout)
    return Loss(total, loss, correct)


def row_losses(model: nn.Module, batch: Batch) -> RowCrossEntropy:
    """Cross-entropy of each position of a micro-batch that goes through the readout, without gradients: of all B * L
    of them, or of those that `select` names."""
    targets = _targets(batch)
    loss, correct = _run(model, batch, lambda *arguments: row_cross_entropy(*arguments, targets))
    return RowCrossEntropy(loss, correct)


def _targets(batch: Batch) -> Tensor:
    labels = batch.labels.flatten()
    return labels if batch.select is None else labels[batch.select]


def _run(model: nn.Module, batch: Batch, readout: Callable[..., Any]) -> Any:
    return model(
        batch.inputs,
        cu_seqlens=batch.cu_seqlens,
        attention_mask=batch.attention_mask,
        max_seqlen=batch.max_seqlen,
        select=batch.select,
        readout=readout,
    )
