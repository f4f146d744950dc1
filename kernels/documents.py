"""Boundaries of packed documents, and chunks that a sequence is cut into.

A packed layout is one row (batch 1) of `seqlen` tokens holding several documents; `cu_seqlens` (int32, first 0, last
`seqlen`, one entry more than there are documents) gives the boundaries. Two ways of cutting it into chunks are used:

- dense: chunks of equal size over the whole row; masks keep the documents apart. It costs what an unpacked row of the
  same length costs, and is what training uses.
- aligned: every document starts a chunk of its own and its last chunk is filled up. Needed when documents bring states
  or give them back, because a state can only enter and leave at a chunk's edge.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.context import Context, Crossing, from_left, from_right, where_crossing


def document_ids(cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """Index of the document of each position: (seqlen,) int64 on the device of `cu_seqlens`, no host sync."""
    positions = torch.arange(seqlen, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].to(torch.int64), positions, right=True)


class ChunkLayout(NamedTuple):
    """A layout of tokens as a list of M = rows * per_row chunks of `chunk` positions."""

    seqlen: int
    chunk: int
    rows: int
    per_row: int
    documents: Tensor | None = None
    """(M, chunk) document of each position where a chunk can hold several; None: a row is one document."""
    left: Tensor | None = None
    """(M,) document whose state reaches the chunk's left edge."""
    right: Tensor | None = None
    """(M,) document whose state reaches the chunk's right edge."""
    gather: Tensor | None = None
    """(M * chunk,) source token of each position, `seqlen` where it is padding (aligned layout only)."""
    scatter: Tensor | None = None
    """(seqlen,) position of each token in the aligned layout."""
    firsts: tuple[int, ...] = ()
    """First chunk of each document, -1 for an empty one (aligned layout only)."""
    lasts: tuple[int, ...] = ()
    """Last chunk of each document."""

    @property
    def aligned(self) -> bool:
        return self.gather is not None

    def edge_document(self, last: bool) -> slice:
        """The document of the last or first token, as a slice of one (aligned layout only)."""
        at = self.lasts.index(self.per_row - 1) if last else self.firsts.index(0)
        return slice(at, at + 1)

    def put_edge(self, chunks: Tensor, row: Tensor, last: bool) -> None:
        """Writes the last or first row (batch, ...) of x into what `split` made of it."""
        rows = chunks.view(self.rows, -1, *chunks.shape[2:])
        at = slice(self.seqlen - 1, self.seqlen) if last else slice(0, 1)
        rows[:, at if self.scatter is None else self.scatter[at]] = row.unsqueeze(1)

    def split(self, x: Tensor) -> Tensor:
        """(batch, seqlen, ...) -> (M, chunk, ...), zero where there is no token. A view where possible."""
        if self.gather is not None:
            index = self.gather.clamp(max=max(self.seqlen - 1, 0))
            empty = (self.gather == self.seqlen).view(-1, *[1] * (x.dim() - 2))
            x = x[0].index_select(0, index).masked_fill_(empty, 0)
            return x.view(-1, self.chunk, *x.shape[1:])
        missing = self.per_row * self.chunk - self.seqlen
        if missing:
            x = pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
        return x.reshape(self.rows * self.per_row, self.chunk, *x.shape[2:])

    def join(self, x: Tensor) -> Tensor:
        """(M, chunk, ...) -> (batch, seqlen, ...), the inverse of `split`; contiguous."""
        if self.scatter is not None:
            return x.flatten(0, 1).index_select(0, self.scatter)[None]
        x = x.reshape(self.rows, self.per_row * self.chunk, *x.shape[2:])
        return x[:, : self.seqlen].contiguous()


def chunk_layout(rows: int, seqlen: int, chunk: int, cu_seqlens: Tensor | None, *, aligned: bool) -> ChunkLayout:
    """Cut `rows` sequences of `seqlen` tokens into chunks. `aligned` matters only with `cu_seqlens`."""
    per_row = -(-seqlen // chunk)
    if cu_seqlens is None:
        return ChunkLayout(seqlen, chunk, rows, per_row)
    if not aligned:
        documents = pad(document_ids(cu_seqlens, seqlen)[None], (0, per_row * chunk - seqlen), mode="replicate")
        documents = documents.view(per_row, chunk)
        left = torch.cat([documents[:1, 0], documents[:-1, -1]])
        right = torch.cat([documents[1:, 0], documents[-1:, -1]])
        return ChunkLayout(seqlen, chunk, 1, per_row, documents, left, right)

    bounds = cu_seqlens.tolist()
    firsts, lasts, count = [], [], 0
    for start, end in itertools.pairwise(bounds):
        chunks = -(-(end - start) // chunk)
        firsts.append(count if chunks else -1)
        lasts.append(count + chunks - 1 if chunks else -1)
        count += chunks
    device = cu_seqlens.device
    ids = document_ids(cu_seqlens, seqlen)
    first_position = torch.tensor(firsts, device=device, dtype=torch.int64) * chunk
    scatter = torch.arange(seqlen, device=device) - cu_seqlens.to(torch.int64)[ids] + first_position[ids]
    gather = torch.full((count * chunk,), seqlen, device=device, dtype=torch.int64)
    gather[scatter] = torch.arange(seqlen, device=device)
    return ChunkLayout(
        seqlen, chunk, 1, count, gather=gather, scatter=scatter, firsts=tuple(firsts), lasts=tuple(lasts)
    )


def shift_right(x: Tensor, cu_seqlens: Tensor | None, context: Context | None = None) -> Tensor:
    """Row t receives row t - 1 of its document, first rows zero: a copy of (batch, seqlen, ...). context: the ranks
    that hold the other parts of the documents."""
    shifted = torch.zeros_like(x, memory_format=torch.contiguous_format)
    shifted[:, 1:] = keep_within_documents(x[:, :-1], cu_seqlens, x.shape[1])
    if context is not None:
        shifted[:, :1] = where_crossing(Crossing.of(cu_seqlens, x.shape[1]).left, from_left(x[:, -1:], context))
    return shifted


def shift_left(x: Tensor, cu_seqlens: Tensor | None, context: Context | None = None) -> Tensor:
    """Row t receives row t + 1 of its document, last rows zero. The adjoint of `shift_right`."""
    shifted = torch.zeros_like(x, memory_format=torch.contiguous_format)
    shifted[:, :-1] = keep_within_documents(x[:, 1:], cu_seqlens, x.shape[1])
    if context is not None:
        shifted[:, -1:] = where_crossing(Crossing.of(cu_seqlens, x.shape[1]).right, from_right(x[:, :1], context))
    return shifted


def keep_within_documents(moved: Tensor, cu_seqlens: Tensor | None, seqlen: int) -> Tensor:
    if cu_seqlens is None:
        return moved
    ids = document_ids(cu_seqlens, seqlen)
    crosses = ids[1:] != ids[:-1]
    return moved.masked_fill(crosses.view(1, -1, *[1] * (moved.dim() - 2)), 0)
