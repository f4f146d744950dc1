"""What the ranks that hold parts of rows (see `matmix.kernels.context`) send each other in a scan; both forms use it.

A pass of states over a part, in one direction, goes on from zero, or from the initial states of documents that begin in
the part. Then a `Passing` sends the state behind the part to all ranks and gives the state that enters the part, which
is added to the stored states of its chunks, times the decay on the way there. The next direction's states can be
computed in the meantime. The backward pass does the same with cotangents, which go the other way.

With Hydra's shift the first token of a part reads, with the last q of the part before, the state that enters: y = q h.
That row of q goes along, and in the backward pass its gradient goes back along with the cotangents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.context import Context, Crossing, Gathering, carried, held, where_crossing
from matmix.kernels.semiseparable.form import LARGEST_LOG_DECAY, ScanCall, ScanSide


class Part(NamedTuple):
    """A part of rows, here."""

    context: Context
    cu_seqlens: Tensor | None
    """Relative to the part; None: every row is one document over all ranks."""
    seqlen: int
    crossing: Crossing

    @classmethod
    def of(cls, call: ScanCall) -> Part | None:
        """None for whole rows."""
        context, seqlen = Context.named(call.context), call.v.shape[1]
        if context is None:
            return None
        return cls(context, call.cu_seqlens, seqlen, Crossing.of(call.cu_seqlens, seqlen))

    def edge_document(self, last: bool) -> Tensor:
        """The number (1,) of the document with the part's last (first) token, where documents are packed."""
        before = self.cu_seqlens < self.seqlen if last else self.cu_seqlens <= 0
        return before.sum(0, keepdim=True) - 1

    def at_edge(self, x: Tensor, last: bool) -> Tensor:
        """Returns of x (documents, ...) what belongs to that document, (1, ...); of rows all, (rows, ...)."""
        return x if self.cu_seqlens is None else x.index_select(0, self.edge_document(last))

    def own(self, states: Tensor | None, first: bool) -> Tensor | None:
        """Returns the states (documents or rows, ...) of those that have their first (last) token in this part, zeros
        for others."""
        if states is None:
            return None
        here = held(self.context, self.cu_seqlens, self.seqlen, first, states)
        return torch.where(here.view(-1, *[1] * (states.dim() - 1)), states, states.new_zeros(()))


class Passing:
    """The states of one direction under way over the ranks."""

    def __init__(
        self, part: Part, rightwards: bool, behind: Tensor, log_decay: Tensor, row: Tensor | None = None
    ) -> None:
        """behind (rows, nheads, ...): the state behind the part, of the document at that edge, as if none had entered
        it; log_decay (rows, nheads): what states that go through it decay by, as `log_decays` has it; row (rows, ...)
        or None: goes to the next rank. All ranks call it in the same order."""
        self.part, self.rightwards, self.typed = part, rightwards, None if row is None else row.dtype
        through = part.crossing.through
        if through is not None:
            log_decay = log_decay.masked_fill(~through, -torch.inf)
        self.gathering = Gathering(part.context, behind, log_decay, *(() if row is None else (row,)))

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Returns the state that enters the part, shaped like `behind`, and the row of the rank before it in this
        direction; zeros where no document crosses that edge."""
        rank, size = self.part.context.rank, self.part.context.size
        edge = self.part.crossing.left if self.rightwards else self.part.crossing.right
        behind, log_decay, *rows = self.gathering.wait()
        state = where_crossing(edge, carried(behind, log_decay, rank, self.rightwards))
        if not rows:
            return state, None
        source = rank - 1 if self.rightwards else rank + 1
        row = rows[0][source] if 0 <= source < size else torch.zeros_like(rows[0][0])
        return state, where_crossing(edge, row).to(self.typed)


def log_decays(side: ScanSide, seqlen: int, like: Tensor) -> Tensor:
    """Returns the sum of a direction's log-decays over the part, (rows, nheads) in the dtype of `like` (rows, nheads,
    ...)."""
    steps = side.log_decay
    if steps is None:
        return like.new_zeros(like.shape[:2])
    steps = steps.to(like.dtype).clamp(max=LARGEST_LOG_DECAY)
    return steps.sum(1) if steps.dim() == 3 else (steps * seqlen).expand(like.shape[:2])


def edge_row(x: Tensor, last: bool) -> Tensor:
    """The last or the first row (rows, ...) of x (rows, seqlen, ...)."""
    return x[:, -1 if last else 0]


def edge_gradient(entering: Tensor, dy: Tensor, groups: int) -> Tensor:
    """Returns the gradient (rows, groups, d_state) of the row of q that the token at the edge reads the `entering`
    state (rows, nheads, d_state, width) with; dy (rows, nheads, width): the gradient of what it reads, the sum of the
    row in the last column where that has one."""
    return torch.einsum("bhnp,bhp->bhn", entering, dy.to(entering.dtype)).unflatten(1, (groups, -1)).sum(2)
