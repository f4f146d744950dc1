"""Reads the arguments that transformers' own classes take: inputs, documents in a row, columns of logits; and losses.

What they have no meaning for is refused in one line, as it would otherwise be lost without a word.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def tokens_or_embeddings(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The one of the two that is given. Raises ValueError (one line) where it is none of them, or both."""
    if (input_ids is None) == (inputs_embeds is None):
        which = "neither" if input_ids is None else "both"
        raise ValueError(f"the model takes either input_ids or inputs_embeds, and was given {which} of them")
    if inputs_embeds is None:
        return input_ids
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"inputs_embeds holds {inputs_embeds.dtype}, not vectors: pass token ids as input_ids")
    return inputs_embeds


def documents(
    shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor | None, keywords: dict[str, Any]
) -> dict[str, Tensor | None]:
    """Says how the positions of a batch of `shape` make up documents: attention_mask and cu_seqlens of
    `Backbone.forward`.

    position_ids: (B or 1, L), which count each document from 0 on; without padding a row may hold several. keywords:
    cu_seq_lens_q and _k (ndocs + 1,), the boundaries of documents in one row, and max_length_q and _k, which follow
    from them, are taken out of it. Raises ValueError (one line) for all others: models find positions themselves.
    """
    given, also = (keywords.pop(f"cu_seq_lens_{side}", None) for side in "qk")
    for side in "qk":
        keywords.pop(f"max_length_{side}", None)
    if attention_mask is not None and tuple(attention_mask.shape) != shape:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)} for inputs of {shape}: give that")
    if attention_mask is not None and attention_mask.is_floating_point() and bool((attention_mask < 0).any()):
        raise ValueError("attention_mask has values below 0, as sums of scores take: give 1 at tokens, 0 at padding")
    padded = attention_mask is not None and (position_ids is not None or given is not None) and not attention_mask.all()
    boundaries = None
    if position_ids is not None:
        if position_ids.shape not in (shape, (1, shape[1])):
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)} for inputs of {shape}: give that")
        positions = position_ids.expand(shape)
        if not padded:
            boundaries = _boundaries(positions)
        elif bool((positions != attention_mask.bool().cumsum(1) - 1)[attention_mask.bool()].any()):
            raise ValueError("position_ids of padded rows count their real tokens from 0: leave them out")
    if given is None and also is None:
        return {"attention_mask": attention_mask if boundaries is None else None, "cu_seqlens": boundaries}
    if given is None or also is None or not torch.equal(given, also):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k are the boundaries of the same documents: give both alike")
    given = given.flatten().to(torch.int32)
    if shape[0] != 1 or int(given[0]) or int(given[-1]) != shape[1] or not bool((given.diff() > 0).all()):
        raise ValueError(f"cu_seq_lens_q bounds documents in one row: it rises from 0 to {shape[1]} in a batch of 1")
    if padded or (boundaries is not None and not torch.equal(boundaries, given)):
        raise ValueError("cu_seq_lens_q bounds other documents than attention_mask or position_ids: leave those out")
    return {"attention_mask": None, "cu_seqlens": given}


def _boundaries(positions: Tensor) -> Tensor | None:
    """Returns cu_seqlens (ndocs + 1,) int32 of positions (B, L) that start again with each document; None where each
    row is one."""
    starts = positions == 0
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    if not (starts[:, 0].all() and (starts[:, 1:] | goes_on).all()):
        raise ValueError("position_ids count each document from 0, one by one: models find positions themselves")
    if not starts[:, 1:].any():
        return None
    ends = torch.full((1,), starts.numel(), device=starts.device)
    return torch.cat((starts.flatten().nonzero().squeeze(1), ends)).to(torch.int32)


Columns = slice | Tensor
"""Which columns of a batch get logits, as an index: a slice, or int64 (n,) for all rows or (B, n) for each."""


def columns_to_keep(logits_to_keep: int | Tensor | None, shape: tuple[int, int]) -> Columns:
    """Returns the last `logits_to_keep` columns (0: all) of a batch of `shape`, or those that a tensor names: (n,) or
    (B, n) positions, negative ones from the end, or (L,) bool. Raises ValueError (one line) for any other."""
    rows, length = shape
    if not isinstance(logits_to_keep, Tensor):
        keep = int(logits_to_keep or 0)
        if keep < 0:
            raise ValueError(f"logits_to_keep = {keep}: give the number of the last columns, or a tensor of positions")
        return slice(max(length - keep, 0) if keep else 0, length)
    places = logits_to_keep
    if places.dtype == torch.bool and places.shape == (length,):
        return places.nonzero().squeeze(1)
    if places.is_floating_point() or places.dtype == torch.bool or places.dim() not in (1, 2):
        words = f"{places.dtype} of shape {tuple(places.shape)}"
        raise ValueError(f"logits_to_keep is a tensor of {words}: positions are integers (n,) or ({rows}, n)")
    if places.dim() == 2 and places.shape[0] != rows:
        raise ValueError(f"logits_to_keep has {places.shape[0]} rows, the batch {rows}: give the same number")
    if places.numel() and not (-length <= int(places.min()) and int(places.max()) < length):
        raise ValueError(
            f"logits_to_keep names columns beyond the {length} of the batch: count from 0, or from the end"
        )
    return places.long().remainder(length)


def take_columns(x: Tensor, columns: Columns) -> Tensor:
    """Takes columns of x (B, L, ...) -> (B, n, ...)."""
    if isinstance(columns, slice):
        return x[:, columns]
    columns = columns.to(x.device)
    return x[:, columns] if columns.dim() == 1 else x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), columns]


# -- the losses of exported models: those of transformers' own classes, also of a batch that comes in parts ----------


Count = Tensor | int
"""Number of the targets of all batches that one step of the optimizer adds up, what transformers calls
`num_items_in_batch`: a loss is divided by it, so that several small batches make the step of a large one."""


def reduced(loss: Callable[..., Tensor], outputs: Tensor, targets: Tensor, count: Count | None) -> Tensor:
    """A loss of PyTorch as its mean over all targets, or where there is a count, as its sum divided by that."""
    if count is None:
        return loss(outputs, targets)
    return loss(outputs, targets, reduction="sum") / (count.to(outputs.device) if torch.is_tensor(count) else count)


def class_loss(logits: Tensor, labels: Tensor, count: Count | None = None) -> Tensor:
    """Cross-entropy in float32 of logits (..., classes) against labels (...), without labels of -100."""
    return reduced(F.cross_entropy, logits.flatten(0, -2).float(), labels.flatten().long().to(logits.device), count)


def next_token_loss(logits: Tensor, labels: Tensor, *, shifted: bool = False, count: Count | None = None) -> Tensor:
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


def classification_loss(logits: Tensor, labels: Tensor, problem: str | None, count: Count | None = None) -> Tensor:
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


def span_loss(logits: Tensor, positions: Tensor, count: Count | None = None) -> Tensor:
    """Cross-entropy of logits (B, L) against positions (B,), without those from L on."""
    positions = positions.long().flatten().clamp(min=0)
    return class_loss(logits, positions.masked_fill(positions >= logits.shape[1], -100), count)
