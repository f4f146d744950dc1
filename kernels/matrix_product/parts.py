"""States that enter a part of a row from the ranks before it, and cotangents that arrive from those behind it.

A part passes on the product of its matrices or, where a document begins in it, the state at its end: one gather of
these and a fold from the left give the state that each part starts from. Cotangents come from the right in the same
way, as what a part adds and the product that they pass through.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.context import Context, Crossing, Gathering, gathered, held, where_crossing
from matmix.kernels.functions import outside_autocast


class Part(NamedTuple):
    """A rank's part of rows. States are (rows or packed documents, nheads, o, o)."""

    context: Context
    cu_seqlens: Tensor | None
    seqlen: int
    edges: Tensor | None
    """(2,) int64, the packed documents of the first and of the last token."""
    crossing: Crossing
    """Which documents cross the edges; tensors, also without packed documents."""
    columns: int = 0
    """The columns that ranks send, where those behind them are the identity's in all matrices; 0 = all."""

    @classmethod
    def of(cls, context: Context | None, cu_seqlens: Tensor | None, x: Tensor, columns: int = 0) -> Part | None:
        """x (batch, seqlen, ...); None where ranks share no rows."""
        if context is None:
            return None
        if cu_seqlens is None:
            others = context.rank > 0, context.rank < context.size - 1
            left, right = (torch.full((), there, device=x.device) for there in others)
            return cls(context, None, x.shape[1], None, Crossing(left, right, left & right), columns)
        tokens = torch.arange(2, device=x.device) * (x.shape[1] - 1)
        edges = torch.searchsorted(cu_seqlens[1:].to(torch.int64), tokens, right=True)
        return cls(context, cu_seqlens, x.shape[1], edges, Crossing.of(cu_seqlens, x.shape[1]), columns)

    def edge(self, states: Tensor, last: int) -> Tensor:
        """The states (batch, nheads, o, o) of the documents of the first, or with `last` = 1 of the last tokens."""
        return states if self.edges is None else states.index_select(0, self.edges[last].view(1))

    def with_edge(self, states: Tensor, last: int, edge: Tensor) -> Tensor:
        """`states` with others in the place of `edge`."""
        return edge if self.edges is None else states.index_copy(0, self.edges[last].view(1), edge)

    def own(self, states: Tensor | None, first: bool, other: float = 0) -> Tensor | None:
        """States of the rows or documents whose first (last) token lies here, (rows, ...); `other` for others."""
        if states is None:
            return None
        here = held(self.context, self.cu_seqlens, self.seqlen, first, states)
        return states.masked_fill(~here.view(-1, *[1] * (states.dim() - 1)), other)

    def narrow(self, states: Tensor) -> Tensor:
        """The columns that are sent."""
        return states[..., : self.columns] if self.columns else states

    def wide(self, states: Tensor) -> Tensor:
        """All columns, of those that are sent."""
        identity = torch.eye(states.shape[-2], dtype=states.dtype, device=states.device)[:, states.shape[-1] :]
        return torch.cat([states, identity.expand(*states.shape[:-1], -1)], -1)

    @outside_autocast
    def passed_on(self, product: Tensor, starts: Tensor) -> Tensor:
        """What the part passes on, from the product of its last document's matrices and all given initial states."""
        return torch.where(self.crossing.through, product, self.edge(starts, 1) @ product)

    @outside_autocast
    def entered(self, passed: Tensor, starts: Tensor) -> Tensor:
        """Gathers what all parts pass on; returns the states (batch, nheads, o, o) that enter this one, the given ones
        where no document comes from the left."""
        passed, through = Gathering(self.context, self.narrow(passed), self.crossing.through).wait()
        passed = self.wide(passed)
        state = torch.zeros_like(passed[0])
        for rank in range(self.context.rank):
            state = torch.where(through[rank] > 0, state @ passed[rank], passed[rank])
        return torch.where(self.crossing.left, state, self.edge(starts, 0))

    @outside_autocast
    def arriving(self, added: Tensor, product: Tensor) -> Tensor:
        """Gathers the cotangents (batch, nheads, o, o) that this part alone adds for the states that enter it, and the
        products of the documents at its left edge; returns those for the states at its right edge."""
        # Of narrow ones the columns left out count for nothing but themselves, and nothing is asked of them.
        added, product = self.narrow(where_crossing(self.crossing.left, added)), self.narrow(product)
        added, product, through = Gathering(self.context, added, product, self.crossing.through).wait()
        added, product = pad(added, (0, added.shape[-2] - added.shape[-1])), self.wide(product)
        state = torch.zeros_like(added[0])
        for rank in reversed(range(self.context.rank + 1, self.context.size)):
            state = torch.where(through[rank] > 0, added[rank] + state @ product[rank].mT, added[rank])
        return where_crossing(self.crossing.right, state)


def entering_part(passed: Tensor, part: Part) -> Tensor:
    """The states (rows, heads, N, P) that enter a part, from those that each part passes on from zero, with the product
    of its transitions beside them (rows, heads, N, P + N); differentiable."""
    sizes = [passed.shape[-1] - passed.shape[-2], passed.shape[-2]]
    added, product = passed.split(sizes, -1)
    product = where_crossing(part.crossing.through, product)
    added, product = gathered(torch.cat([added, product], -1)[None], 0, part.context).split(sizes, -1)
    # Nothing enters the first part, but in the backward pass all ranks send.
    state = added[0 if part.context.rank else -1]
    for rank in range(1, part.context.rank):
        # What nothing comes through from may be NaN.
        through = (product[rank] != 0).any(-1, keepdim=True).any(-2, keepdim=True)
        state = product[rank] @ where_crossing(through, state) + added[rank]
    return where_crossing(part.crossing.left, state)
