"""What exported models make of the arguments that transformers' own classes take: inputs, documents in a row, columns
of logits. What they have no meaning for is refused in one line, as it would otherwise be lost without a word."""

from __future__ import annotations

from typing import Any

import torch


def tokens_or_embeddings(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The one of the two that is given, which the models of this project both take as their inputs. Raises ValueError
    (one line) where it is none of them, or both."""
    if (input_ids is None) == (inputs_embeds is None):
        which = "neither" if input_ids is None else "both"
        raise ValueError(f"the model takes either input_ids or inputs_embeds, and was given {which} of them")
    if inputs_embeds is None:
        return input_ids
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"inputs_embeds holds {inputs_embeds.dtype}, not vectors: pass token ids as input_ids")
    return inputs_embeds


def refuse_others(keywords: dict[str, Any], owner: str) -> None:
    """Raises ValueError (one line) for the first of the keywords that says something: None and False do not."""
    for name, value in keywords.items():
        if value is not None and value is not False:
            raise ValueError(f"{owner} has no use for {name}: leave it out")


def documents(
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    keywords: dict[str, Any],
) -> dict[str, torch.Tensor | None]:
    """How the positions of a batch of `shape` make up documents: attention_mask and cu_seqlens of `Backbone.forward`.

    position_ids: (B or 1, L), which in each document count from 0 on; a row may hold several documents, one after the
    other, if there is no padding. keywords: cu_seq_lens_q and cu_seq_lens_k (ndocs + 1,), the boundaries of documents
    in one row, and max_length_q and _k, which follow from them, are taken out of it.
    Raises ValueError (one line) for all others, as models find positions themselves.
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
        positions = _expanded(position_ids, shape)
        if padded:
            real = attention_mask.bool()
            if not torch.equal(positions[real], (real.cumsum(1) - 1)[real]):
                raise ValueError("position_ids of padded rows count their real tokens from 0: leave them out")
        else:
            boundaries = _boundaries(positions)
    if given is not None or also is not None:
        if given is None or also is None or not torch.equal(given, also):
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k are the boundaries of the same documents: give both alike"
            )
        given = given.flatten().to(torch.int32)
        if shape[0] != 1 or int(given[0]) or int(given[-1]) != shape[1] or not bool((given.diff() > 0).all()):
            raise ValueError(
                f"cu_seq_lens_q bounds documents in one row: it rises from 0 to {shape[1]} in a batch of 1"
            )
        if padded or (position_ids is not None and boundaries is not None and not torch.equal(boundaries, given)):
            raise ValueError(
                "cu_seq_lens_q bounds other documents than attention_mask or position_ids: leave those out"
            )
        boundaries = given
    return {"attention_mask": None if boundaries is not None else attention_mask, "cu_seqlens": boundaries}


def _expanded(position_ids: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    if position_ids.dim() != 2 or position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)} for inputs of {shape}: give that")
    return position_ids.expand(shape)


def _boundaries(positions: torch.Tensor) -> torch.Tensor | None:
    """cu_seqlens (ndocs + 1,) int32 of positions (B, L) that start again with each document; None where each row is
    one."""
    starts = positions == 0
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    if not (starts[:, 0].all() and (starts[:, 1:] | goes_on).all()):
        raise ValueError("position_ids count each document from 0, one by one: models find positions themselves")
    if not starts[:, 1:].any():
        return None
    ends = torch.full((1,), starts.numel(), device=starts.device)
    return torch.cat((starts.flatten().nonzero().squeeze(1), ends)).to(torch.int32)


Columns = slice | torch.Tensor
"""Which columns of a batch get logits, as an index: a slice, or int64 (n,) for all rows or (B, n) for each."""


def columns_to_keep(logits_to_keep: int | torch.Tensor | None, shape: tuple[int, int]) -> Columns:
    """The last `logits_to_keep` columns (0: all) of a batch of `shape`, or those that a tensor names: (n,) or (B, n)
    positions, negative ones from the end, or (L,) bool. Raises ValueError (one line) for any other."""
    length = shape[1]
    if not isinstance(logits_to_keep, torch.Tensor):
        keep = int(logits_to_keep or 0)
        if keep < 0:
            raise ValueError(f"logits_to_keep = {keep}: give the number of the last columns, or a tensor of positions")
        return slice(max(length - keep, 0) if keep else 0, length)
    found = logits_to_keep
    if found.dtype == torch.bool and found.shape == (length,):
        return found.nonzero().squeeze(1)
    if found.is_floating_point() or found.dtype == torch.bool or found.dim() not in (1, 2):
        words = f"{found.dtype} of shape {tuple(found.shape)}"
        raise ValueError(f"logits_to_keep is a tensor of {words}: positions are integers (n,) or ({shape[0]}, n)")
    if found.dim() == 2 and found.shape[0] != shape[0]:
        raise ValueError(f"logits_to_keep has {found.shape[0]} rows, the batch {shape[0]}: give the same number")
    if found.numel() and not (-length <= int(found.min()) and int(found.max()) < length):
        raise ValueError(
            f"logits_to_keep names columns beyond the {length} of the batch: count from 0, or from the end"
        )
    return found.long().remainder(length)


def take_columns(x: torch.Tensor, columns: Columns) -> torch.Tensor:
    """(B, L, ...) -> (B, n, ...)"""
    columns = columns if isinstance(columns, slice) else columns.to(x.device)
    if isinstance(columns, slice) or columns.dim() == 1:
        return x[:, columns]
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), columns]
