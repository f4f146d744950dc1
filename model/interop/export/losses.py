"""The losses of exported models: those of transformers' own classes, also of a batch that comes in parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Count = torch.Tensor | int
"""Number of the targets of all batches that one step of the optimizer adds up, what transformers calls
`num_items_in_batch`: a loss is divided by it, so that several small batches make the step of a large one."""


def reduced(
    loss: Callable[..., torch.Tensor], outputs: torch.Tensor, targets: torch.Tensor, count: Count | None
) -> torch.Tensor:
    """A loss of PyTorch as its mean over all targets, or where there is a count, as its sum divided by that."""
    if count is None:
        return loss(outputs, targets)
    return loss(outputs, targets, reduction="sum") / (count.to(outputs.device) if torch.is_tensor(count) else count)


def class_loss(logits: torch.Tensor, labels: torch.Tensor, count: Count | None = None) -> torch.Tensor:
    """Cross-entropy in float32 of logits (..., classes) against labels (...), without labels of -100."""
    return reduced(F.cross_entropy, logits.flatten(0, -2).float(), labels.flatten().long().to(logits.device), count)


def next_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, shifted: bool = False, count: Count | None = None
) -> torch.Tensor:
    """Cross-entropy in float32 of logits (B, L, vocab_size) against the tokens that follow, without labels of -100.

    labels: (B, L) the tokens themselves, or where they are shifted, what follows each position, as those pass it that
    split sequences. Raises ValueError (one line) where there is not one for each of the logits.
    """
    if labels.shape != logits.shape[:2]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape[:2])}: give one for each "
            "position, with logits_to_keep for each that is kept"
        )
    return class_loss(logits, labels, count) if shifted else class_loss(logits[:, :-1], labels[:, 1:], count)


def classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, problem: str | None, count: Count | None = None
) -> torch.Tensor:
    """The loss of logits (B, num_labels) in float32, as transformers' own classes have it.

    problem: "regression", labels (B,) or (B, num_labels) values; "single_label_classification", labels (B,) classes;
    "multi_label_classification", labels (B, num_labels) 0 or 1; None = regression with one label, else by the type of
    the labels. Raises ValueError (one line) for values of -100 where there is a count, which leaves them out.
    """
    if problem is None and logits.shape[-1] == 1:
        problem = "regression"
    if problem is None:
        problem = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if problem == "single_label_classification":
        return class_loss(logits, labels, count)
    logits, targets = logits.float(), labels.to(logits.device, torch.float32)
    if problem == "regression":
        if count is not None and bool((targets == -100).any()):
            raise ValueError("labels hold the value -100, which Trainer does not count as a target: scale the values")
        return reduced(F.mse_loss, logits.flatten(), targets.flatten(), count)
    return reduced(F.binary_cross_entropy_with_logits, logits, targets, count)


def span_loss(logits: torch.Tensor, positions: torch.Tensor, count: Count | None = None) -> torch.Tensor:
    """Cross-entropy of logits (B, L) against positions (B,), without those from L on."""
    positions = positions.long().flatten().clamp(min=0)
    return class_loss(logits, positions.masked_fill(positions >= logits.shape[1], -100), count)
