"""The micro-batch that the loader hands to the training loop, and how it is put together from rows."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from matmix.data.loading.masking import IGNORED

SMALL = 1 << 18
"""Bytes up to which a tensor goes from a reading process to the training process within the message: shared memory
takes a file descriptor, for which they connect with each other."""


@dataclass(slots=True)
class Batch:
    """A micro-batch of B sequences of L positions: tokens, or whatever else the source of the data reads or generates.

    Concatenated documents come with `cu_seqlens`, one document a row with `attention_mask`, whole rows with neither. A
    part of rows that ranks share is one row, always with `cu_seqlens`.
    """

    inputs: torch.Tensor
    """(B, L, ...), what the model reads: token ids int64 (B, L), or for example values float32 (B, L, channels)."""
    labels: torch.Tensor
    """int64 (B, L): the token to predict at each position (for causal models already shifted), -100 = none; or float32
    (B, L, ...): the values to predict, NaN = none. Labelled examples have (n, ...) for n outputs, which may be those of
    documents."""
    cu_seqlens: torch.Tensor | None = None
    """int32 (ndocs + 1,): borders of the documents over the flattened B * L tokens, from 0 to B * L. A
    row begins a new one; padding behind the last token of a row counts as a document of its own. In a part of rows the
    first may lie below 0 and the last above B * L (`part_batch`)."""
    attention_mask: torch.Tensor | None = None
    """bool (B, L): True where there is a token, False where there is padding."""
    max_seqlen: int = 0
    """Tokens of the longest document (piece) in the micro-batch."""
    select: torch.Tensor | None = None
    """int64 (n,): flattened positions that have a label, ascending; None for causal models."""
    n_tokens: int = 0
    """Real tokens (positions), without padding."""
    n_damaged: int = 0
    """Rows that are padding because a shard they need cannot be used."""
    damaged: dict[str, str] = field(default_factory=dict)
    """The damaged shards: name -> what is wrong with it, in one line."""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further inputs of the model by name, (B, L, ...), such as token_type_ids."""
    continues: torch.Tensor | None = None
    """bool (B,): the row goes on with the document that the same row of the global batch before ended in; None where
    nothing is carried (`data.carry`). A part has those of all rows, false for rows of which it has no token."""
    carried: Any = None
    """What the model carries from the rows before and will carry to the next ones; set by whoever runs it."""
    examples: torch.Tensor | None = None
    """int64 (n,): of labelled examples, the number of the one that each output belongs to, -1 = none."""
    weights: torch.Tensor | None = None
    """float32 (B, L): what a prediction at each position weighs in the loss, above 0 wherever one may be asked for,
    label or not, and 0 elsewhere; None = all the same."""
    cursor: tuple[int, int, int, int] | None = None
    """Where the stream that it was read from goes on (`matmix.data.foreign`); None where samples have numbers."""

    @property
    def input_ids(self) -> torch.Tensor:
        """The inputs of a batch of tokens: int64 (B, L)."""
        return self.inputs

    def __reduce__(self) -> tuple[Any, ...]:
        # By the size of the memory: other views of larger memory would lose theirs, as it moves to shared memory.
        def sent(one: torch.Tensor) -> torch.Tensor | np.ndarray:
            return one.numpy() if one.is_cpu and one.untyped_storage().nbytes() <= SMALL else one

        return _unpickled, (tree_map_only(torch.Tensor, sent, self.values()),)

    def values(self) -> dict[str, Any]:
        """Returns its fields by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Returns the batch with what `change` makes of each tensor."""
        return replace(self, **tree_map_only(torch.Tensor, change, self.values()))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self.map(lambda tensor: tensor.pin_memory())


def _unpickled(values: dict[str, Any]) -> Batch:
    return Batch(**tree_map_only(np.ndarray, torch.from_numpy, values))


def row_batch(inputs: np.ndarray, labels: np.ndarray, *, n_tokens: int, causal: bool) -> Batch:
    """Returns a batch of rows that are one document each, with inputs (B, L, ...) and labels (B, L, ...) as they are.
    n_tokens: positions without padding. Batches that are not causal come with `select`."""
    batch = Batch(torch.from_numpy(inputs), torch.from_numpy(labels), max_seqlen=inputs.shape[1], n_tokens=n_tokens)
    return batch if causal else selecting(batch)


def selecting(batch: Batch) -> Batch:
    """Returns the batch with `select`, for models that are not causal."""
    batch.select = torch.from_numpy(np.flatnonzero(has_target(batch.labels.numpy())))
    return batch


def with_selected(batch: Batch, count: int) -> Batch:
    """Returns the batch with `count` positions in `select`, not fewer than it has: the last ones without a label."""
    without = np.flatnonzero(~has_target(batch.labels.numpy()))[: count - batch.select.numel()]
    return replace(batch, select=torch.cat([batch.select, torch.from_numpy(without)]))


def image_batch(images: torch.Tensor, labels: torch.Tensor, n_images: int | None = None, **more: Any) -> Batch:
    """Returns a batch of images (B, C, H, W): labels int64 (B,) or float32 (B, classes), `n_images` of them real (None
    = all), and `more` fields of `Batch`."""
    return Batch(inputs=images, labels=labels, n_tokens=len(images) if n_images is None else n_images, **more)


def has_target(labels: np.ndarray) -> np.ndarray:
    """Returns bool (B, L): which positions have something to predict, by labels as in `Batch`."""
    if labels.dtype.kind != "f":
        return labels != IGNORED
    return ~np.isnan(labels).reshape(*labels.shape[:2], -1).all(axis=2)


def packed_batch(inputs: np.ndarray, labels: np.ndarray, begins: np.ndarray, counts: np.ndarray, packing: str) -> Batch:
    """Returns a batch with what tells its documents apart: inputs and labels (B, L, ...), begins bool (B, L) True where
    a document begins, counts int64 (B,) = real tokens of each row, packing that of `DataConfig`."""
    max_seqlen = seqlen = inputs.shape[1]
    batch = Batch(torch.from_numpy(inputs), torch.from_numpy(labels), n_tokens=int(counts.sum()))
    if packing == "document":
        # A row without a token (it fills up the last batch) keeps one: no model meets an empty document.
        batch.attention_mask = torch.from_numpy(np.arange(seqlen) < np.maximum(counts, 1)[:, None])
        max_seqlen = max(int(counts.max()), 1)
    elif packing == "concat":
        batch.cu_seqlens = _boundaries(begins, counts)
        max_seqlen = int(batch.cu_seqlens.diff().max())
    batch.max_seqlen = max_seqlen
    return batch


def part_batch(
    inputs: np.ndarray,
    labels: np.ndarray,
    begins: np.ndarray,
    counts: np.ndarray,
    packing: str,
    *,
    first: int,
    n_tokens: int,
) -> Batch:
    """Returns a batch of a part of rows whose other parts are on other ranks: inputs and labels (n, ...), as one row.

    begins, counts: of the whole rows, as of `packed_batch`. first: which of their tokens, counted row after row, is the
    part's first; n_tokens: its real tokens. `cu_seqlens` counts from that token and has all documents that touch the
    part, whole: the first begins at 0 or below, the last ends at n or above.
    """
    if packing != "concat":
        begins = np.zeros_like(begins)
    if packing == "rows":
        counts = np.full_like(counts, begins.shape[1])
    boundaries = _boundaries(begins, counts) - first
    touching = (boundaries[1:] > 0) & (boundaries[:-1] < len(inputs))
    boundaries = torch.cat([boundaries[:-1][touching], boundaries[1:][touching][-1:]])
    return Batch(
        torch.from_numpy(inputs).unsqueeze(0),
        torch.from_numpy(labels).unsqueeze(0),
        cu_seqlens=boundaries,
        max_seqlen=int(boundaries.diff().max()),
        n_tokens=n_tokens,
    )


def _boundaries(begins: np.ndarray, counts: np.ndarray) -> torch.Tensor:
    """Returns where documents begin in the flattened rows and the end, int32: a row begins one, as does padding."""
    borders = begins.copy()
    borders[:, 0] = True
    short = np.flatnonzero(counts < borders.shape[1])
    borders[short, counts[short]] = True
    return torch.from_numpy(np.append(np.flatnonzero(borders), borders.size).astype(np.int32))
