"""Backward pass of the matrix-product scan: B_t = G_t + B_{t+1} X_{t+1}^T, dX_t = H_{t-1}^T B_t."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.matrix_product.forward import given_states
from matmix.kernels.matrix_product.spans import ProductDocuments, ProductSpan, multiplies_wide, product_spans
from matmix.kernels.precision import outside_autocast


@outside_autocast
def product_backward(
    dh: Tensor | None,
    dfinal: Tensor | None,
    x: Tensor,
    h: Tensor,
    products: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the initial state. `dh` and `dfinal` are read only."""
    documents = ProductDocuments(cu_seqlens)
    packed = cu_seqlens is not None
    rows = cu_seqlens.shape[0] - 1 if packed else x.shape[0]
    given = given_states(initial_state, rows, x)
    learned = initial_state is not None
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgiven = torch.zeros(given.shape, dtype=given.dtype, device=x.device)
    carry = torch.zeros(x.shape[0], *x.shape[2:], dtype=given.dtype, device=x.device)
    if dfinal is not None:
        dfinal = dfinal.to(given.dtype)
        if packed:
            # A document without tokens hands its state, and so its gradient, straight on.
            dgiven[documents.empty] = dfinal[documents.empty]
        else:
            carry = dfinal
    for span in reversed(product_spans(x, chunk_size, documents)):
        gradient = ProductGradient(span, dh, dfinal if packed else None)
        entered = h[:, span.tokens.start - 1] if span.tokens.start else given[: x.shape[0]]
        several = span.count > 1
        arriving = carries_from_right(span, gradient, carry, products) if several else carry.unsqueeze(1)
        recurrence = BackwardRecurrence(span, gradient, dgiven if packed and learned else None)
        carry = span_gradients(span, recurrence, arriving, entered, given if learned else None, h, dx)
    if not packed:
        dgiven = carry
    return dx, dgiven.to(initial_state.dtype) if learned else None


class ProductGradient:
    """The cotangent of a span's states: `dh`, plus `dfinal` at the last token of each packed document."""

    def __init__(self, span: ProductSpan, dh: Tensor | None, dfinal: Tensor | None):
        self.span, self.dfinal = span, dfinal
        self.dh = None if dh is None else span.view(dh)

    def load(self, block: range, out: Tensor) -> Tensor:
        given = self.dh is not None
        out = self.span.load(self.dh, block.start, block.stop, out) if given else out[: len(block)].zero_()
        if self.dfinal is not None:
            for step in self.span.ends.keys() & set(block):
                rows, documents = self.span.ends[step]
                out[step - block.start][0, rows] += self.dfinal[documents]
        return out


class BackwardRecurrence:
    """B_t of all chunks of a span, from the last step to the first, a block of steps at a time.

    What a step adds to the one before it is B_t X_t^T, except where a document begins: there it is the gradient of
    that document's initial state, written to `dgiven` if that is given.
    """

    def __init__(self, span: ProductSpan, gradient: ProductGradient, dgiven: Tensor | None):
        self.span, self.gradient, self.dgiven = span, gradient, dgiven
        self.factors, self.sums = span.buffers(), span.buffers()
        self.above = span.buffer().view(span.flat)

    def run(self, block: range, arriving: Tensor | None) -> Tensor:
        """B_t of the block's steps, (steps, *lanes); `arriving` is what the last step of all gets from its right."""
        span = self.span
        last = block.stop == span.chunk
        sums = self.gradient.load(block, self.sums)
        factors = span.by_lane(span.load(span.x, block.start + 1, block.stop + (not last), self.factors))
        slots = span.by_lane(sums)
        above = self.above
        for number in reversed(range(len(block))):
            if number < len(factors):
                self.pass_left(above, factors[number], block[number] + 1, slots[number])
            elif arriving is not None:
                sums[number] += arriving
            above = slots[number]
        self.above.copy_(above)
        return sums

    def pass_left(self, above: Tensor, factor: Tensor, step: int, out: Tensor) -> None:
        """out += B X^T, where B is `above` and both belong to `step`."""
        restart = self.span.starts.get(step)
        if restart is not None:
            self.to_initial_states(above, factor, restart)
            kept = self.span.rows(out)[restart[0]]
        out.baddbmm_(above, factor.mT)
        if restart is not None:
            self.span.rows(out)[restart[0]] = kept

    def to_initial_states(self, above: Tensor, factor: Tensor, restart: tuple[Tensor, Tensor]) -> None:
        rows, documents = restart
        if self.dgiven is not None:
            self.dgiven[documents] = self.span.rows(above)[rows] @ self.span.rows(factor)[rows].mT


def carries_from_right(span: ProductSpan, gradient: ProductGradient, carry: Tensor, products: Tensor) -> Tensor:
    """What reaches the last token of each chunk from its right, (batch, count, nheads, o, o).

    carry (batch, nheads, o, o): what reaches the last chunk.
    """
    if multiplies_wide(span.x):
        local, products = sent_left_wide(span, gradient, products)
    else:
        local = sent_left(span, gradient)
    local, factors = span.chunk_major(local.view(span.lanes)), span.chunk_major(products)
    arriving = [carry.flatten(0, 1)]
    for chunk in reversed(range(1, span.count)):
        own = local[chunk]
        alone = chunk in span.cut
        arriving.append(own if alone else torch.baddbmm(own, arriving[-1], factors[chunk].mT))
    return span.lane_major(arriving[::-1])


def sent_left_wide(span: ProductSpan, gradient: ProductGradient, products: Tensor) -> tuple[Tensor, Tensor]:
    """What each chunk sends left if nothing reaches it, and its product: the sum of G_t P_t^T, where P_t is the product
    of its matrices up to t; one wide product per block of steps.
    """
    local, loaded = span.buffer().view(span.flat), span.buffers()
    for block in span.blocks():
        rights = span.wide(products, block)
        sums = torch.empty_like(rights)
        for slot, given in zip(sums.unbind(4), gradient.load(block, loaded), strict=True):
            slot.copy_(given)
        restarted = span.restarted(block)
        if restarted is not None:
            rows, steps = restarted
            sums[0, rows, :, :, steps] = 0
        pair = sums.flatten(4).flatten(0, 2), rights.flatten(4).flatten(0, 2).mT
        local = local.baddbmm_(*pair) if block.start else torch.bmm(*pair, out=local)
    return local, rights[..., -1, :]


def sent_left(span: ProductSpan, gradient: ProductGradient) -> Tensor:
    """What each chunk sends left if nothing reaches it, by the recurrence. For large matrices."""
    recurrence = BackwardRecurrence(span, gradient, None)
    for block in reversed(span.blocks()):
        recurrence.run(block, None)
    factor = span.buffer().copy_(span.x[:, :, 0]).view(span.flat)
    local = torch.bmm(recurrence.above, factor.mT)
    if 0 in span.starts:
        span.rows(local)[span.starts[0][0]] = 0
    return local


def span_gradients(
    span: ProductSpan,
    recurrence: BackwardRecurrence,
    arriving: Tensor,
    entered: Tensor,
    given: Tensor | None,
    h: Tensor,
    dx: Tensor,
) -> Tensor:
    """Write the span's part of `dx`; returns what passes to its left.

    entered: the state that enters the span; given: the initial states of documents, None for the identity.
    """
    states, dstates, previous = span.view(h), span.view(dx), span.buffers()
    for block in reversed(span.blocks()):
        sums = recurrence.run(block, arriving)
        first = max(block.start - 1, 0)
        span.load(states, first, block.stop - 1, previous[1 if block.start == 0 else 0 :])
        if block.start == 0:
            previous[0, :, 0] = entered
            previous[0, :, 1:] = states[:, :-1, -1]
        left = previous[: len(block)]
        # The factors have been used: their buffer takes the result.
        result = recurrence.factors[: len(block)]
        torch.bmm(left.mT.flatten(0, 3), sums.flatten(0, 3), out=result.flatten(0, 3))
        for number, step in enumerate(block):
            if step in span.starts:
                rows, documents = span.starts[step]
                own = sums[number][0, rows]
                result[number][0, rows] = own if given is None else given[documents].mT @ own
        span.store(result, dstates, block.start)
    factor = span.buffer().copy_(span.x[:, :, 0])
    top = recurrence.above.view(span.lanes)
    if 0 in span.starts:
        recurrence.to_initial_states(recurrence.above, factor, span.starts[0])
        if 0 in span.starts[0][0].tolist():
            return torch.zeros_like(top[:, 0])
    return top[:, 0] @ factor[:, 0].mT
