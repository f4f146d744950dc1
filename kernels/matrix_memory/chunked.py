"""The matrix memory in chunks, in PyTorch, with a hand-written backward pass.

States are turned by small matrices, far too small to be multiplied one at a time. Cutting documents into chunks makes
(chunks x heads) independent lanes, which lie along the fastest dimensions of all tensors here: every number of a matrix
is a long vector, and a step of all chunks is a few multiply-adds of vectors. One walk over the steps gives what a
chunk's own tokens write and read, from states of zero, and the products P_t of the transitions since its start, of
which only P_t q_t is kept. The states E that enter chunks follow by a short scan over these, and add E (P_t q_t) to the
outputs.

The backward pass is G_t = dy_t q_t^T + G_{t+1} A_{t+1}^T, and dA_t = S_{t-1}^T G_t, dv_t = G_t k_t, dk_t = G_t^T v_t,
dq_t = S_t^T dy_t. What a chunk sends to the one on its left is the sum of dy_t (P_t q_t)^T, and what comes from its
right times its whole product. Kept for it are the inputs and the states that enter chunks; all others are computed
again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matmix.kernels.documents import chunk_layout
from matmix.kernels.functions import (
    Form,
    Operation,
    cache_blocks,
    in_pytorch,
    lane_product,
    outside_autocast,
    working_dtype,
)
from matmix.kernels.mru.constructions import bounded_rows, bounded_rows_gradient

CHUNK = 16
"""Tokens of a chunk."""


class MemoryInputs(NamedTuple):
    """The arguments of matmix::matrix_memory; see `matrix_memory`."""

    values: Tensor
    elements: Tensor
    keys: Tensor
    queries: Tensor
    rates: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class MemoryOutputs(NamedTuple):
    """The results of matmix::matrix_memory."""

    y: Tensor
    final: Tensor
    edges: Tensor
    """The states that enter chunks, for the backward pass; shaped as the form that runs likes it."""


def edges_like(given: MemoryInputs) -> Tensor:
    """Room for the states that enter chunks, (P, N, a bound of the chunks of all documents, nheads)."""
    batch, seqlen, heads, width = given.values.shape
    steps = min(CHUNK, seqlen)
    chunks = batch * -(-seqlen // steps)
    if given.cu_seqlens is not None:
        chunks = seqlen // steps + given.cu_seqlens.shape[0] - 1
    shape = width, given.keys.shape[2], chunks, heads
    return given.values.new_empty(shape, dtype=working_dtype(given.values))


class Lanes:
    """The inputs in chunks, (steps, n, lanes, heads) with a lane for each chunk, and the way from chunk to chunk."""

    def __init__(self, given: MemoryInputs):
        batch, seqlen, self.heads, self.width = given.values.shape
        self.order, self.dtype = given.keys.shape[-1], working_dtype(given.values)
        self.steps = min(CHUNK, seqlen)
        self.layout = layout = chunk_layout(batch, seqlen, self.steps, given.cu_seqlens, aligned=True)
        self.count = layout.rows * layout.per_row
        self.documents = len(layout.firsts) if layout.aligned else batch
        spans = zip(layout.firsts, layout.lasts, strict=True)
        if not layout.aligned:
            spans = ((row * layout.per_row, (row + 1) * layout.per_row - 1) for row in range(batch))
        spans = [(document, first, last - first + 1) for document, (first, last) in enumerate(spans) if first >= 0]
        self.successions = [
            tuple(
                torch.tensor(places, device=given.values.device)
                for places in zip(*((first + n, document) for document, first, long in spans if n < long), strict=True)
            )
            for n in range(max((long for *_, long in spans), default=0))
        ]
        """For n = 0, 1, ...: the n-th chunks of all documents that have so many, and these documents."""
        self.values, self.queries = self.split(given.values), self.split(given.queries.unsqueeze(2))
        self.turns, self.sizes = transitions(self.split(given.elements))
        self.keys, self.rates = self.split(given.keys.unsqueeze(2)), given.rates.to(self.dtype).mT.unsqueeze(1)
        self.written = self.keys * self.rates

    def split(self, x: Tensor) -> Tensor:
        """(batch, seqlen, heads, n) -> (steps, n, lanes, heads), zeros where there is no token."""
        return self.layout.split(x).permute(1, 3, 0, 2).to(self.dtype).contiguous()

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """`split` undone; typed and shaped like an input, contiguous."""
        return self.layout.join(x.permute(2, 0, 3, 1).to(like.dtype)).reshape(like.shape)

    def states(self, x: Tensor | None) -> Tensor:
        """(documents, heads, width, order), or None for zeros -> (width, order, documents, heads), a copy."""
        if x is None:
            return self.values.new_zeros(self.width, self.order, self.documents, self.heads)
        return x.to(self.dtype, copy=True).permute(2, 3, 0, 1).contiguous()

    def blocks(self) -> list[slice]:
        """Slices of the lanes of which a step fits a cache."""
        return cache_blocks(self.count, self.width * self.order * self.heads // 4, self.values.device)

    def advance(self, state: Tensor, step: int, block: slice, out: Tensor | None = None) -> Tensor:
        """The states (width, order, lanes, heads) after a step, from those before it."""
        state = lane_product(state, self.turns[step, :, :, block], out)
        return state.addcmul_(self.values[step, :, None, block], self.written[step, None, :, block])


def transitions(elements: Tensor) -> tuple[Tensor, Tensor]:
    """A (steps, order, order, ...) and the sizes (steps, order, 1, ...) that the rows of I + M were divided by, 1 and
    above, from M (steps, order^2, ...)."""
    order = math.isqrt(elements.shape[1])
    rows = elements.unflatten(1, (order, order)).clone()
    for i in range(order):
        rows[:, i, i] += 1
    return bounded_rows(rows, 2)


def add_read(y: Tensor, state: Tensor, query: Tensor) -> None:
    """y (n, ...) += state (n, order, ...) times query (order, ...)."""
    for j in range(query.shape[0]):
        y.addcmul_(state[:, j], query[j])


def products_within(lanes: Lanes) -> tuple[Tensor, Tensor]:
    """The products of whole chunks (order, order, lanes, heads), and P_t q_t (steps, order, lanes, heads)."""
    product, seen = torch.empty_like(lanes.turns[0]), torch.zeros_like(lanes.turns[:, 0])
    for block in lanes.blocks():
        p = lanes.turns[0, :, :, block].clone(memory_format=torch.contiguous_format)
        spare = torch.empty_like(p)
        for step in range(lanes.steps):
            if step:
                p, spare = lane_product(p, lanes.turns[step, :, :, block], spare), p
            add_read(seen[step, :, block], p, lanes.queries[step, :, block])
        product[:, :, block] = p
    return product, seen


@outside_autocast
def memory_forward(given: MemoryInputs) -> MemoryOutputs:
    lanes = Lanes(given)
    product, seen = products_within(lanes)
    y = torch.zeros_like(lanes.values)
    passed = y.new_zeros(lanes.width, lanes.order, *y.shape[2:])
    for block in lanes.blocks():
        state = passed[:, :, block].contiguous()
        spare = torch.empty_like(state)
        for step in range(lanes.steps):
            state, spare = lanes.advance(state, step, block, spare), state
            add_read(y[step, :, block], state, lanes.queries[step, :, block])
        passed[:, :, block] = state
    final, edges = lanes.states(given.initial_state), edges_like(given)
    for chunks, owners in lanes.successions:
        state = final[:, :, owners]
        edges[:, :, chunks] = state
        final[:, :, owners] = passed[:, :, chunks] + lane_product(state, product[:, :, chunks])
    for block in lanes.blocks():
        for step in range(lanes.steps):
            add_read(y[step, :, block], edges[:, :, block], seen[step, :, block])
    return MemoryOutputs(lanes.join(y, given.values), final.permute(2, 3, 0, 1).contiguous(), edges)


@outside_autocast
def memory_backward(
    given: MemoryInputs, outputs: MemoryOutputs, cotangents: MemoryOutputs
) -> tuple[Tensor | None, ...]:
    """Gradients of values, elements, keys, queries, rates and initial states. Incoming gradients are read only."""
    lanes = Lanes(given)
    edges = outputs.edges[:, :, : lanes.count]
    dy = torch.zeros_like(lanes.values) if cotangents.y is None else lanes.split(cotangents.y)
    product, seen = products_within(lanes)
    arriving = torch.zeros_like(edges)
    for block in lanes.blocks():
        for step in range(lanes.steps):
            arriving[:, :, block].addcmul_(dy[step, :, None, block], seen[step, None, :, block])
    dinitial = lanes.states(cotangents.final)
    for chunks, owners in reversed(lanes.successions):
        from_right, own = dinitial[:, :, owners], arriving[:, :, chunks]
        dinitial[:, :, owners] = own + lane_product(from_right, product[:, :, chunks].transpose(0, 1))
        arriving[:, :, chunks] = from_right

    dvalues, dturns = torch.zeros_like(lanes.values), torch.zeros_like(lanes.turns)
    dqueries, dwritten = torch.empty_like(lanes.queries), torch.empty_like(seen)
    for block in lanes.blocks():
        states = [edges[:, :, block].contiguous()]
        for step in range(lanes.steps):
            states.append(lanes.advance(states[-1], step, block))
        gradient = arriving[:, :, block].contiguous()
        spare = torch.empty_like(gradient)
        for step in reversed(range(lanes.steps)):
            cotangent = dy[step, :, None, block]
            dqueries[step, :, block] = (states[step + 1] * cotangent).sum(0).sum(-1, keepdim=True)
            gradient.addcmul_(cotangent, lanes.queries[step, None, :, block])
            add_read(dvalues[step, :, block], gradient, lanes.written[step, :, block])
            dwritten[step, :, block] = (gradient * lanes.values[step, :, None, block]).sum(0)
            for i in range(lanes.width):
                dturns[step, :, :, block].addcmul_(states[step][i, :, None], gradient[i, None])
            gradient, spare = lane_product(gradient, lanes.turns[step, :, :, block].transpose(0, 1), spare), gradient
    dkeys = (dwritten * lanes.rates).sum(-1, keepdim=True)
    drates = (dwritten * lanes.keys).sum((0, 2)).mT
    delements = bounded_rows_gradient(lanes.turns, lanes.sizes, dturns, 2).flatten(1, 2)
    gradients = [dvalues, delements, dkeys, dqueries]
    initial = given.initial_state
    return (
        *(lanes.join(gradient, like) for gradient, like in zip(gradients, given, strict=False)),
        drates.to(given.rates.dtype).contiguous(),
        None if initial is None else dinitial.permute(2, 3, 0, 1).to(initial.dtype).contiguous(),
    )


MATRIX_MEMORY = Operation(
    "matrix_memory", MemoryInputs, MemoryOutputs, Form(memory_forward, memory_backward),
    without_gradient=("edges",), kept=lambda given: ("edges",),
)  # fmt: skip


def matrix_memory_torch(
    *tensors: Tensor, return_final_state: bool = False, context: None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`matrix_memory` of whole rows in PyTorch, without argument checks; see there."""
    y, final, _ = in_pytorch(MATRIX_MEMORY)(MemoryInputs(*tensors, **options))
    return (y, final) if return_final_state else y
