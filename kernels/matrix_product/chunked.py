"""Matrix-product scan in chunks, in PyTorch, with a hand-written backward pass.

Multiplying o x o matrices one at a time is slow. Cutting the sequence into chunks makes (batch x chunks x heads)
independent lanes: all chunks at once multiply their matrices into products P_t since the chunk's start, and a short
scan over the chunks' whole products gives the state E that enters each. Then H_t = E P_t no longer waits for H_{t-1}:
the P_t of several steps lie side by side in memory, and E [P_1 | P_2 | ...] is one wide product, far cheaper than one
each.

The backward pass is B_t = G_t + B_{t+1} X_{t+1}^T, dX_t = H_{t-1}^T B_t. What a chunk sends to the one on its left is
the sum of G_t P_t^T, wide products again, plus what it gets from its right times its whole product. With that known,
the recurrence runs in all chunks at once. Kept for it are the input, the output and the P_t, float32. A packed document
restarts the product: its first state is written over whatever reached it and the states after it are the P_t as they
are, so nothing of its neighbour, not even an overflow, comes through.

Matrices of order 16 and more gain nothing from lying side by side and would only be moved about more. For them both
second passes run the recurrence in all chunks at once, and only each chunk's product is kept.

Where ranks share rows, each of the scans over chunks waits for the other ranks: what enters a part, or arrives at it,
is known once the products of chunks are (`parts.py`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matmix.kernels.context import Context
from matmix.kernels.functions import Form, Operation, cache_blocks, in_pytorch, outside_autocast, working_dtype
from matmix.kernels.matrix_product.parts import Part
from matmix.kernels.matrix_product.spans import (
    ProductDocuments,
    ProductSpan,
    multiplies_wide,
    product_spans,
    products_like,
)


class ProductInputs(NamedTuple):
    """The arguments of matmix::matrix_product_scan."""

    x: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    chunk_size: int | None = None
    context: str = ""
    columns: int = 0


class ProductOutputs(NamedTuple):
    """The results of matmix::matrix_product_scan."""

    h: Tensor
    final: Tensor
    products: Tensor
    """The products inside chunks, or of chunks, for the backward pass; shaped as the form that runs likes it."""
    entered: Tensor | None
    """The states (batch, nheads, o, o) that enter a part, for the backward pass."""


@outside_autocast
def product_forward(given: ProductInputs, entered: Tensor | None = None) -> ProductOutputs:
    """entered: the states that enter a part, if they are known from before."""
    x, initial_state, cu_seqlens, chunk_size, context, columns = given
    documents, dtype = ProductDocuments(cu_seqlens, x.shape[1]), working_dtype(x)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    starts = given_states(initial_state, rows, x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    products = products_like(x, chunk_size, context)
    firsts, final = starts, starts.clone()
    if documents.starts:
        tokens, owners = (torch.tensor(index, device=x.device) for index in zip(*documents.starts, strict=True))
        begun = x[0].index_select(0, tokens).to(dtype)
        firsts = starts.clone()
        firsts[owners] = begun if initial_state is None else starts[owners] @ begun
    # Where packed documents begin with the row nothing reaches their first token from its left: any state will do.
    state = starts if cu_seqlens is None else starts[:1]
    spans, part = product_spans(x, chunk_size, documents), Part.of(Context.named(context), cu_seqlens, x, columns)
    factors = [chunk_products(span, firsts, products, part is not None) for span in spans]
    if part is not None and entered is None:
        last_cut = max((span.before + chunk for span in spans for chunk in span.cut), default=0)
        passed, _ = joined(torch.cat(factors, 1)[:, last_cut:])
        passed = part.passed_on(passed, starts) if cu_seqlens is None else passed
        entered = part.entered(passed, starts)
    state = state if entered is None else entered
    for span, factor in zip(spans, factors, strict=True):
        unrounded = None if out.dtype == dtype else final
        entering = entering_products(span, state, factor)
        if multiplies_wide(x):
            state = product_states(span, entering, products, span.view(out), unrounded)
        else:
            state = recurrent_states(span, entering, firsts, span.view(out), unrounded)
    if cu_seqlens is None:
        final = state.contiguous()
    elif out.dtype == dtype and documents.ends:
        tokens, owners = (list(index) for index in zip(*documents.ends, strict=True))
        final[owners] = out[0, tokens]
    return ProductOutputs(out, final if part is None else part.own(final, first=False), products, entered)


def given_states(initial_state: Tensor | None, rows: int, x: Tensor) -> Tensor:
    """The initial states in the working dtype, the identity where none are given; not to be written to."""
    if initial_state is not None:
        return initial_state.to(working_dtype(x))
    identity = torch.eye(x.shape[-1], dtype=working_dtype(x), device=x.device)
    return identity.expand(rows, *x.shape[2:])


def chunk_products(span: ProductSpan, firsts: Tensor, products: Tensor, wanted: bool) -> Tensor | None:
    """Write the running products of each chunk, or the last of them alone; returns those of whole chunks, (batch,
    count, nheads, o, o). None for a single chunk without products inside, unless `wanted`."""
    wide = multiplies_wide(span.x)
    if span.count == 1 and not wide and not wanted:
        return None
    factors = span.buffers()
    current, spare = span.buffer().view(span.flat), span.buffer().view(span.flat)
    for block in span.blocks():
        rights = span.by_lane(span.load(span.x, block.start, block.stop, factors))
        slots = span.wide(products, block).flatten(0, 2).unbind(2) if wide else ()
        for step, right in zip(block, rights, strict=True):
            if step:
                torch.bmm(current, right, out=spare)
                current, spare = spare, current
            else:
                current.copy_(right)
            restart_product(span, step, current, firsts)
            if wide:
                slots[step - block.start].copy_(current)
    current = current.view(span.lanes)
    if not wide:
        span.of_chunks(products).copy_(current)
    return current


def entering_products(span: ProductSpan, state: Tensor, products: Tensor | None) -> Tensor:
    """The state that enters each chunk, from the one that enters the first and the products of whole chunks."""
    if products is None:
        return state.unsqueeze(1).clone(memory_format=torch.contiguous_format)
    states = [state.flatten(0, 1)]
    for chunk, product in enumerate(span.chunk_major(products)[:-1]):
        states.append(product if chunk in span.cut else torch.bmm(states[-1], product))
    return span.lane_major(states)


def joined(factors: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The product of all factors (batch, count, nheads, o, o) from left to right, and what all together send left if
    each by itself sends its `sums`, (batch, nheads, o, o)."""
    while (count := factors.shape[1]) > 1:
        even = count // 2 * 2
        left, right = factors[:, :even:2], factors[:, 1:even:2]
        if sums is not None:
            pairs = sums[:, :even:2] + sums[:, 1:even:2] @ left.mT
            sums = torch.cat([pairs, sums[:, even:]], 1)
        factors = torch.cat([left @ right, factors[:, even:]], 1)
    return factors[:, 0], None if sums is None else sums[:, 0]


def restart_product(span: ProductSpan, step: int, current: Tensor, firsts: Tensor) -> None:
    """Documents that begin at this step: their first state replaces whatever reached it."""
    if step in span.starts:
        rows, documents = span.starts[step]
        span.rows(current)[rows] = firsts[documents]


def product_states(span: ProductSpan, entering: Tensor, products: Tensor, out: Tensor, final: Tensor | None) -> Tensor:
    """Every state, a block of steps at once: what enters a chunk times the products inside it. Returns the last.

    `final`, if given, receives the states where documents end, unrounded. Products behind a restart are states already;
    they are set to zero afterwards, so that the backward pass sends nothing through them.
    """
    for block in span.blocks():
        rights = span.wide(products, block)
        states = torch.bmm(entering.flatten(0, 2), rights.flatten(4).flatten(0, 2)).view(rights.shape)
        restarted = span.restarted(block)
        if restarted is not None:
            rows, steps = restarted
            states[0, rows, :, :, steps] = rights[0, rows, :, :, steps]
            rights[0, rows, :, :, steps] = 0
        out[:, :, block.start : block.stop] = states.permute(0, 1, 4, 2, 3, 5)
        for step in span.ends.keys() & set(block) if final is not None else ():
            rows, documents = span.ends[step]
            final[documents] = states[0, rows, :, :, step - block.start]
    return states[:, -1, :, :, -1]


def recurrent_states(span: ProductSpan, state: Tensor, firsts: Tensor, out: Tensor, final: Tensor | None) -> Tensor:
    """The same by the recurrence in all chunks, for large matrices."""
    factors, states = span.buffers(), span.buffers()
    slots, state = span.by_lane(states), state.view(span.flat)
    for block in span.blocks():
        rights = span.by_lane(span.load(span.x, block.start, block.stop, factors))
        # The state before a block's first step lies in the buffer's last slot: never in the one written to.
        for step, right, slot in zip(block, rights, slots[: len(block)], strict=True):
            state = torch.bmm(state, right, out=slot)
            restart_product(span, step, state, firsts)
            if final is not None and step in span.ends:
                rows, documents = span.ends[step]
                final[documents] = span.rows(state)[rows]
        span.store(states[: len(block)], out, block.start)
    return state.view(span.lanes)[:, -1]


@outside_autocast
def product_backward(
    given: ProductInputs, outputs: ProductOutputs, cotangents: ProductOutputs
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the initial state. Incoming gradients are read only."""
    x, initial_state, cu_seqlens, chunk_size, context, columns = given
    h, _, products, entered = outputs
    dh, dfinal, *_ = cotangents
    documents, part = ProductDocuments(cu_seqlens, x.shape[1]), Part.of(Context.named(context), cu_seqlens, x, columns)
    packed = cu_seqlens is not None
    rows = cu_seqlens.shape[0] - 1 if packed else x.shape[0]
    starts = given_states(initial_state, rows, x)
    learned = initial_state is not None
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgiven = torch.zeros(starts.shape, dtype=starts.dtype, device=x.device)
    carry = torch.zeros(x.shape[0], *x.shape[2:], dtype=starts.dtype, device=x.device)
    if dfinal is not None:
        dfinal = dfinal.to(starts.dtype) if part is None else part.own(dfinal.to(starts.dtype), first=False)
        if packed:
            # A document without tokens hands its state, and so its gradient, straight on.
            dgiven[documents.empty] = dfinal[documents.empty]
        else:
            carry = dfinal
    # B_t takes the place of dX_t first, where the dtypes allow.
    sums = dx if dx.dtype == starts.dtype else torch.empty_like(dx, dtype=starts.dtype)
    spans = product_spans(x, chunk_size, documents)
    gradients = [ProductGradient(span, dh, dfinal if packed else None) for span in spans]
    sent = [
        sent_left(span, gradient, products) if span.count > 1 or part is not None else None
        for span, gradient in zip(spans, gradients, strict=True)
    ]
    if part is not None:
        count = min((span.before + chunk + 1 for span in spans for chunk in span.cut), default=None)
        added, factors = (torch.cat(of_spans, 1)[:, :count] for of_spans in zip(*sent, strict=True))
        product, added = joined(factors, added)
        carry = carry + part.arriving(added + carry @ product.mT if not packed else added, product)
        starts = part.with_edge(starts, 0, entered)
    for span, gradient, of_chunks in reversed(list(zip(spans, gradients, sent, strict=True))):
        arriving = carry.unsqueeze(1) if of_chunks is None else carries_from_right(span, carry, *of_chunks)
        recurrence = BackwardRecurrence(span, gradient, dgiven if packed and learned else None)
        carry = span_sums(span, recurrence, arriving, sums)
    if not packed:
        dgiven = carry
    if part is not None:
        dgiven = part.own(dgiven, first=True)
    multiply_by_states(sums, h, documents if packed else None, starts if learned or part is not None else None, dx)
    return dx, dgiven.to(initial_state.dtype) if learned else None


class ProductGradient:
    """The cotangent of a span's states: `dh`, plus `dfinal` at the last token of each packed document."""

    def __init__(self, span: ProductSpan, dh: Tensor | None, dfinal: Tensor | None):
        self.span, self.dfinal = span, dfinal
        self.dh = None if dh is None else span.view(dh)

    def load(self, block: range, out: Tensor, wide: bool = False) -> Tensor:
        """Loads the cotangents of a block as (steps, *lanes), or `wide` as (batch, count, nheads, o, steps, o)."""
        out = out if wide else out[: len(block)]
        if self.dh is None:
            out.zero_()
        elif wide:
            out.copy_(self.dh[:, :, block.start : block.stop].permute(0, 1, 3, 4, 2, 5))
        else:
            self.span.load(self.dh, block.start, block.stop, out)
        for step in self.span.ends.keys() & set(block) if self.dfinal is not None else ():
            rows, documents = self.span.ends[step]
            number, every = step - block.start, slice(None)
            out[(0, rows, every, every, number) if wide else (number, 0, rows)] += self.dfinal[documents]
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


def carries_from_right(span: ProductSpan, carry: Tensor, local: Tensor, products: Tensor) -> Tensor:
    """Returns the cotangent that reaches the last token of each chunk from its right, (batch, count, nheads, o, o).

    carry (batch, nheads, o, o): what reaches the last chunk; local, products: see `sent_left`.
    """
    local, factors = span.chunk_major(local), span.chunk_major(products)
    arriving = [carry.flatten(0, 1)]
    for chunk in reversed(range(1, span.count)):
        own = local[chunk]
        alone = chunk in span.cut
        arriving.append(own if alone else torch.baddbmm(own, arriving[-1], factors[chunk].mT))
    return span.lane_major(arriving[::-1])


def sent_left(span: ProductSpan, gradient: ProductGradient, products: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what each chunk sends left if nothing reaches it, and its product, both (batch, count, nheads, o, o). The
    first is the sum of G_t P_t^T, where P_t is the product of its matrices up to t: one wide product per block of
    steps, or the recurrence."""
    if not multiplies_wide(span.x):
        recurrence = BackwardRecurrence(span, gradient, None)
        for block in reversed(span.blocks()):
            recurrence.run(block, None)
        local = torch.bmm(recurrence.above, span.buffer().copy_(span.x[:, :, 0]).view(span.flat).mT)
        if 0 in span.starts:
            span.rows(local)[span.starts[0][0]] = 0
        return local.view(span.lanes), span.of_chunks(products)
    local = span.buffer().view(span.flat)
    for block in span.blocks():
        rights = span.wide(products, block)
        sums = gradient.load(block, torch.empty_like(rights), wide=True)
        restarted = span.restarted(block)
        if restarted is not None:
            rows, steps = restarted
            sums[0, rows, :, :, steps] = 0
        pair = sums.flatten(4).flatten(0, 2), rights.flatten(4).flatten(0, 2).mT
        local = local.baddbmm_(*pair) if block.start else torch.bmm(*pair, out=local)
    return local.view(span.lanes), rights[..., -1, :]


def span_sums(span: ProductSpan, recurrence: BackwardRecurrence, arriving: Tensor, out: Tensor) -> Tensor:
    """Write the span's B_t into `out`; returns what passes to its left."""
    target = span.view(out)
    for block in reversed(span.blocks()):
        span.store(recurrence.run(block, arriving), target, block.start)
    factor = span.buffer().copy_(span.x[:, :, 0])
    top = recurrence.above.view(span.lanes)
    if 0 in span.starts:
        recurrence.to_initial_states(recurrence.above, factor, span.starts[0])
        if 0 in span.starts[0][0].tolist():
            return torch.zeros_like(top[:, 0])
    return top[:, 0] @ factor[:, 0].mT


def multiply_by_states(
    sums: Tensor, h: Tensor, documents: ProductDocuments | None, given: Tensor | None, dx: Tensor
) -> None:
    """dX_t = H_{t-1}^T B_t, a cache's worth of tokens at a time; `sums`, B_t, may be dx itself.

    given: the initial states of rows or documents, which their first tokens multiply; None for the identity.
    """
    if documents is None:
        rows, tokens = torch.arange(h.shape[0]), torch.zeros(h.shape[0], dtype=torch.int64)
        owners = rows
    else:
        tokens, owners = torch.tensor(documents.firsts, dtype=torch.int64).view(-1, 2).unbind(1)
        rows = torch.zeros_like(tokens)
    first = rows.to(h.device), tokens.to(h.device)
    own = sums[first]
    states, cotangents, out = (y.flatten(0, 1) for y in (h, sums, dx))
    for block in cache_blocks(len(states) - 1, math.prod(h.shape[2:]) // 8, h.device):
        here = slice(block.start + 1, block.stop + 1)
        left = states[block].to(sums.dtype).flatten(0, 1).mT
        out[here] = torch.bmm(left, cotangents[here].flatten(0, 1)).view(out[here].shape)
    dx[first] = (own if given is None else given[owners.to(given.device)].mT @ own).to(dx.dtype)


MATRIX_PRODUCT = Operation(
    "matrix_product_scan", ProductInputs, ProductOutputs, Form(product_forward, product_backward),
    without_gradient=("products", "entered"), kept=lambda given: ("h", "products", "entered"),
)  # fmt: skip


def matrix_product_chunked(
    x: Tensor, *, return_final_state: bool = False, reverse: bool = False, scan: str = "chunked", **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`matrix_product_scan` in PyTorch, without argument checks; see there. In chunks whatever the `scan`, as exports
    without matmix run it: the result is the same."""
    return run_product(in_pytorch(MATRIX_PRODUCT), ProductInputs(x, **options), return_final_state, reverse)


def run_product(
    scan: Callable, given: ProductInputs, return_final_state: bool, reverse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """States, and if asked for final ones, by a scan that runs forward: that from the right is it read backwards."""
    x, initial_state, cu_seqlens, *_ = given
    if reverse:
        given = given._replace(x=x.flip(1))
        if cu_seqlens is not None:
            flipped = None if initial_state is None else initial_state.flip(0)
            given = given._replace(initial_state=flipped, cu_seqlens=x.shape[1] - cu_seqlens.flip(0))
    h, final, *_ = scan(given)
    if reverse:
        h, final = h.flip(1), final if cu_seqlens is None else final.flip(0)
    return (h, final) if return_final_state else h
