"""Objectives: a batch and a model in, sums and counts out.

Sums instead of means keep gradient accumulation, packing, masking and uneven ranks exact: the loop divides by the
number of targets of the whole global batch, wherever its pieces were computed.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from matmix.data.batch import Batch
from matmix.train.config import ObjectiveConfig
from matmix.train.cross_entropy import IGNORED, linear_cross_entropy


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
    labels = batch.labels.flatten()
    targets = labels if batch.select is None else labels[batch.select]

    def readout(features: Tensor, weight: Tensor, bias: Tensor | None):
        return linear_cross_entropy(features, weight, bias, targets, z_loss=config.z_loss)

    # Unpacked by position: some engines hand a named tuple back as a plain one.
    total, loss, correct = model(
        batch.input_ids,
        cu_seqlens=batch.cu_seqlens,
        attention_mask=batch.attention_mask,
        max_seqlen=batch.max_seqlen,
        select=batch.select,
        readout=readout,
    )
    return Loss(total, loss, correct)
