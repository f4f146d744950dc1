"""Matrix-product scan in chunks, in PyTorch, with a hand-written backward pass.

H_t = H_{t-1} X_t is sequential in t, and multiplying o x o matrices one at a time is slow. Cutting the
sequence into chunks makes (batch x chunks x heads) independent lanes: one pass multiplies each chunk
together, a short scan over the chunk products gives the state that enters each chunk, a second pass runs the
recurrence in all chunks at once and writes the output. Two products per token, no log-depth tree, and no
temporary larger than one step of all lanes.

The backward pass B_t = G_t + B_{t+1} X_{t+1}^T, dX_t = H_{t-1}^T B_t works in the same two passes from the
right. It keeps the input, the output and one product per chunk. A packed document restarts the product: its
first state is written over whatever reached it, so nothing of its neighbour, not even an overflow, comes
through.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def default_product_chunk(seqlen: int) -> int:
    """Somewhat below the square root of the length: a step costs about twice what scanning a chunk does."""
    chunk = 1
    while 8 * chunk * chunk <= seqlen:
        chunk *= 2
    return chunk


def products_like(x: Tensor, chunk_size: int | None) -> Tensor:
    """An empty tensor shaped like the chunk products that `product_forward` returns for x."""
    chunk = min(chunk_size or default_product_chunk(x.shape[1]), x.shape[1])
    count = x.shape[1] // chunk
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((x.shape[0], count, *x.shape[2:]) if count > 1 else (0,), dtype=dtype)


class ProductRestarts:
    """First tokens of packed documents inside a span of tokens cut into chunks.

    `at[t]`: chunks in which a document begins at step t, and those documents; `cut`: chunks in which any
    begins.
    """

    def __init__(self, starts: list[tuple[int, int]], offset: int, count: int, chunk: int, device: torch.device):
        at: dict[int, tuple[list[int], list[int]]] = {}
        self.cut: set[int] = set()
        for position, document in starts:
            row, step = divmod(position - offset, chunk)
            if 0 <= row < count:
                rows, documents = at.setdefault(step, ([], []))
                rows.append(row)
                documents.append(document)
                self.cut.add(row)
        self.at = {step: tuple(torch.tensor(index, device=device) for index in pair) for step, pair in at.items()}


class ProductSpan:
    """A piece of the sequence, (batch, count, chunk, nheads, o, o), with the buffers its steps share."""

    def __init__(self, x: Tensor, offset: int, count: int, chunk: int, dtype: torch.dtype, restarts: ProductRestarts):
        self.slice = slice(offset, offset + count * chunk)
        self.count, self.chunk, self.dtype, self.restarts = count, chunk, dtype, restarts
        self.x = self.view(x)
        self.lanes = (x.shape[0], count, *x.shape[2:])
        self.flat = (x.shape[0] * count * x.shape[2], *x.shape[3:])
        # PyTorch multiplies matrices this small in a loop of its own, which wants the right factor
        # transposed.
        self.tiny = x.device.type == "cpu" and x.shape[-1] ** 3 < 400
        self.factor = self.buffer()

    def view(self, x: Tensor) -> Tensor:
        return x[:, self.slice].unflatten(1, (self.count, self.chunk))

    def buffer(self) -> Tensor:
        return torch.empty(self.lanes, dtype=self.dtype, device=self.x.device)

    def times(self, state: Tensor, step: int, out: Tensor) -> None:
        """out = state X_step in every lane."""
        if self.tiny:
            self.multiply(state, self.factor.copy_(self.x[:, :, step].mT).mT, out)
        else:
            self.multiply(state, self.factor.copy_(self.x[:, :, step]), out)

    def times_transposed(self, state: Tensor, step: int, out: Tensor) -> None:
        """out = state X_step^T in every lane."""
        self.multiply(state, self.factor.copy_(self.x[:, :, step]).mT, out)

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.bmm(a.flatten(0, 2), b.flatten(0, 2), out=out.view(self.flat))


def product_spans(x: Tensor, chunk_size: int | None, starts: list[tuple[int, int]]) -> list[ProductSpan]:
    """Whole chunks first, then what is left at the end as one short chunk."""
    seqlen = x.shape[1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    chunk = min(chunk_size or default_product_chunk(seqlen), seqlen)
    count, left = divmod(seqlen, chunk) if seqlen else (0, 0)
    pieces = [(0, count, chunk)] if count else []
    if left:
        pieces.append((seqlen - left, 1, left))
    return [ProductSpan(x, *piece, dtype, ProductRestarts(starts, *piece, x.device)) for piece in pieces]


def document_starts(cu_seqlens: Tensor | None) -> tuple[list[tuple[int, int]], list[int]]:
    """(first token, document) of documents that have tokens; last token of each document, -1 if empty."""
    if cu_seqlens is None:
        return [], []
    bounds = cu_seqlens.tolist()
    pairs = list(itertools.pairwise(bounds))
    starts = [(start, document) for document, (start, end) in enumerate(pairs) if end > start]
    return starts, [end - 1 if end > start else -1 for start, end in pairs]


def product_forward(
    x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """States (batch, seqlen, nheads, o, o) typed like x, final states, and chunk products."""
    starts, lasts = document_starts(cu_seqlens)
    spans = product_spans(x, chunk_size, starts)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    batch, _, heads, order, _ = x.shape
    identity = torch.eye(order, dtype=dtype, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    products = identity.new_zeros(0)
    if cu_seqlens is None:
        state = identity.expand(batch, heads, order, order) if initial_state is None else initial_state.to(dtype)
        firsts = final = None
    else:
        # Each document's first state, and, in `final`, its last as the passes reach it.
        state = identity.expand(batch, heads, order, order)
        count = len(lasts)
        given = identity.expand(count, heads, order, order) if initial_state is None else initial_state.to(dtype)
        final = given.clone()
        firsts = torch.empty_like(final)
        if starts:
            tokens, documents = (torch.tensor(index, device=x.device) for index in zip(*starts, strict=True))
            begun = x[0].index_select(0, tokens).to(dtype)
            firsts[documents] = begun if initial_state is None else given[documents] @ begun
    for span in spans:
        entering, found = product_entries(span, state, firsts)
        products = found if found is not None else products
        state = product_rerun(span, entering, firsts, span.view(out), final, lasts)
    return out, (state.contiguous() if final is None else final), products


def product_entries(span: ProductSpan, state: Tensor, firsts: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The state that enters each chunk and, of several chunks, each one's product since its last restart."""
    if span.count == 1:
        return state.unsqueeze(1).clone(memory_format=torch.contiguous_format), None
    current, spare = span.buffer(), span.buffer()
    current.copy_(span.x[:, :, 0])
    for step in range(span.chunk):
        if step:
            span.times(current, step, spare)
            current, spare = spare, current
        if step in span.restarts.at:
            rows, documents = span.restarts.at[step]
            current[0, rows] = firsts[documents]
    entering = spare
    for chunk in range(span.count):
        entering[:, chunk] = state
        product = current[:, chunk]
        state = product if chunk in span.restarts.cut else state @ product
    return entering, current


def product_rerun(
    span: ProductSpan,
    state: Tensor,
    firsts: Tensor | None,
    out: Tensor,
    final: Tensor | None,
    lasts: list[int],
) -> Tensor:
    """Run the recurrence in all chunks of the span at once, writing every state; returns the last chunk's."""
    ending: dict[int, list[tuple[int, int]]] = {}
    for document, last in enumerate(lasts):
        row, step = divmod(last - span.slice.start, span.chunk)
        if last >= 0 and 0 <= row < span.count:
            ending.setdefault(step, []).append((row, document))
    spare = span.buffer()
    for step in range(span.chunk):
        span.times(state, step, spare)
        state, spare = spare, state
        if step in span.restarts.at:
            rows, documents = span.restarts.at[step]
            state[0, rows] = firsts[documents]
        out[:, :, step] = state
        if step in ending:
            rows, documents = (list(index) for index in zip(*ending[step], strict=True))
            final[documents] = state[0, rows]
    return state[:, -1]


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
    starts, lasts = document_starts(cu_seqlens)
    spans = product_spans(x, chunk_size, starts)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    batch, _, heads, order, _ = x.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    identity = torch.eye(order, dtype=dtype, device=x.device)
    packed = cu_seqlens is not None
    rows = len(lasts) if packed else batch
    given = identity.expand(rows, heads, order, order) if initial_state is None else initial_state.to(dtype)
    dgiven = torch.zeros(rows, heads, order, order, dtype=dtype, device=x.device)
    carry = torch.zeros(batch, heads, order, order, dtype=dtype, device=x.device)
    if dfinal is not None and not packed:
        carry = dfinal.to(dtype)
    if packed and dfinal is not None:
        dgiven = dgiven + dfinal.to(dtype) * torch.tensor(lasts, device=x.device).lt(0).view(-1, 1, 1, 1)
    for span in reversed(spans):
        gradient = ProductGradient(span, dh, dfinal if packed else None, lasts)
        if span.slice.start:
            before = h[:, span.slice.start - 1].to(dtype)
        else:
            before = given[:1].expand(batch, -1, -1, -1) if packed else given
        carry = product_span_backward(span, gradient, carry, before, given, dgiven, h, dx, products)
    if not packed:
        dgiven = carry
    return dx, None if initial_state is None else dgiven.to(initial_state.dtype)


class ProductGradient:
    """The cotangent of a span's states: `dh`, plus `dfinal` at the last token of each packed document."""

    def __init__(self, span: ProductSpan, dh: Tensor | None, dfinal: Tensor | None, lasts: list[int]):
        self.dh = None if dh is None else span.view(dh)
        self.dfinal = dfinal
        self.ends: dict[int, tuple[list[int], list[int]]] = {}
        for document, last in enumerate(lasts if dfinal is not None else []):
            row, step = divmod(last - span.slice.start, span.chunk)
            if last >= 0 and 0 <= row < span.count:
                rows, documents = self.ends.setdefault(step, ([], []))
                rows.append(row)
                documents.append(document)

    def add_to(self, carry: Tensor, step: int) -> Tensor:
        """carry + cotangent at this step of every chunk, in place of `carry`."""
        if self.dh is not None:
            carry.add_(self.dh[:, :, step])
        if step in self.ends:
            rows, documents = self.ends[step]
            carry[0, rows] += self.dfinal[documents].to(carry.dtype)
        return carry


def product_span_backward(
    span: ProductSpan,
    gradient: ProductGradient,
    carry: Tensor,
    before: Tensor,
    given: Tensor,
    dgiven: Tensor,
    h: Tensor,
    dx: Tensor,
    products: Tensor,
) -> Tensor:
    """Write the span's part of `dx`, and `dgiven` where documents begin; returns what passes to its left.

    carry (batch, nheads, o, o): what comes from the right, already times X^T of the token there; before: the
    state that enters the span; given, dgiven: the documents' initial states and their gradients.
    """
    current, spare = span.buffer(), span.buffer()
    if span.count > 1:
        current.zero_()
        for step in reversed(range(span.chunk)):
            span.times_transposed(gradient.add_to(current, step), step, spare)
            current, spare = spare, current
            if step in span.restarts.at:
                current[0, span.restarts.at[step][0]] = 0
        # `current` is what each chunk passes to its left by itself; `spare` becomes what reaches it from its
        # right.
        for chunk in reversed(range(span.count)):
            spare[:, chunk] = carry
            carry = (
                current[:, chunk] if chunk in span.restarts.cut else (current[:, chunk] + carry @ products[:, chunk].mT)
            )
        current, spare = spare, current
    else:
        current.copy_(carry.unsqueeze(1))
    states, dstates = span.view(h), span.view(dx)
    previous, turned = span.buffer(), span.buffer() if span.tiny else None
    for step in reversed(range(span.chunk)):
        gradient.add_to(current, step)
        if step:
            previous.copy_(states[:, :, step - 1])
        else:
            previous[:, 0] = before
            previous[:, 1:] = states[:, :-1, -1]
        right = current if turned is None else turned.copy_(current.mT).mT
        span.multiply(previous.mT, right, spare)
        restart = span.restarts.at.get(step)
        if restart is not None:
            rows, documents = restart
            spare[0, rows] = given[documents].mT @ current[0, rows]
        dstates[:, :, step] = spare
        span.times_transposed(current, step, spare)
        current, spare = spare, current
        if restart is not None:
            dgiven[documents] = current[0, rows]
            current[0, rows] = 0
    return current[:, 0]


class MatrixProductFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, initial_state, cu_seqlens, chunk_size):
        h, final, products = product_forward(x, initial_state, cu_seqlens, chunk_size)
        ctx.save_for_backward(x, h, products, initial_state, cu_seqlens)
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return h, final

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dfinal):
        x, h, products, initial_state, cu_seqlens = ctx.saved_tensors
        grads = product_backward(dh, dfinal, x, h, products, initial_state, cu_seqlens, ctx.chunk_size)
        return *grads, None, None


def matrix_product_chunked(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`matrix_product_scan` in PyTorch, without argument checks; see there."""
    x, initial_state, cu_seqlens = reverse_products(x, initial_state, cu_seqlens, reverse)
    h, final = MatrixProductFunction.apply(x, initial_state, cu_seqlens, chunk_size)
    if reverse:
        h = h.flip(1)
        final = final if cu_seqlens is None else final.flip(0)
    return (h, final) if return_final_state else h


def reverse_products(
    x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The inputs whose forward scan, read backwards, is the scan from the right."""
    if not reverse:
        return x, initial_state, cu_seqlens
    if cu_seqlens is None:
        return x.flip(1), initial_state, None
    flipped = None if initial_state is None else initial_state.flip(0)
    return x.flip(1), flipped, x.shape[1] - cu_seqlens.flip(0)
