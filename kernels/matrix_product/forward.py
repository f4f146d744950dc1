"""Forward pass of the matrix-product scan: products inside chunks, a scan over chunks, then all states."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.functions import outside_autocast
from matmix.kernels.matrix_product.spans import (
    ProductDocuments,
    ProductSpan,
    product_dtype,
    product_spans,
    products_like,
)


@outside_autocast
def product_forward(
    x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """States (batch, seqlen, nheads, o, o) typed like x, final states, and the products inside chunks."""
    documents = ProductDocuments(cu_seqlens)
    dtype = product_dtype(x)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    given = given_states(initial_state, rows, x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    products = products_like(x)
    firsts, final = given, given.clone()
    if documents.starts:
        tokens, owners = (torch.tensor(index, device=x.device) for index in zip(*documents.starts, strict=True))
        begun = x[0].index_select(0, tokens).to(dtype)
        firsts = given.clone()
        firsts[owners] = begun if initial_state is None else given[owners] @ begun
    # With packed documents nothing reaches the first token from its left: any state will do there.
    state = given if cu_seqlens is None else given[:1]
    for span in product_spans(x, chunk_size, documents):
        unrounded = None if out.dtype == dtype else final
        entering = product_entries(span, state, firsts, products)
        state = product_states(span, entering, products, span.view(out), unrounded)
    if cu_seqlens is None:
        final = state.contiguous()
    elif out.dtype == dtype and documents.ends:
        tokens, owners = (list(index) for index in zip(*documents.ends, strict=True))
        final[owners] = out[0, tokens]
    return out, final, products


def given_states(initial_state: Tensor | None, rows: int, x: Tensor) -> Tensor:
    """The initial states in the working dtype, the identity where none are given; not to be written to."""
    if initial_state is not None:
        return initial_state.to(product_dtype(x))
    identity = torch.eye(x.shape[-1], dtype=product_dtype(x), device=x.device)
    return identity.expand(rows, *x.shape[2:])


def product_entries(span: ProductSpan, state: Tensor, firsts: Tensor, products: Tensor) -> Tensor:
    """Write the running products of each chunk; returns the state that enters each, (batch, count, nheads, o, o)."""
    factors = span.buffers()
    current, spare = span.buffer().view(span.flat), span.buffer().view(span.flat)
    for block in span.blocks():
        rights = span.by_lane(span.load(span.x, block.start, block.stop, factors))
        slots = span.wide(products, block).flatten(0, 2).unbind(2)
        for step, right, slot in zip(block, rights, slots, strict=True):
            if step:
                torch.bmm(current, right, out=spare)
                current, spare = spare, current
            else:
                current.copy_(right)
            restart_product(span, step, current, firsts)
            slot.copy_(current)
    return entering_products(span, state, current)


def entering_products(span: ProductSpan, state: Tensor, products: Tensor) -> Tensor:
    """The state that enters each chunk, from the one that enters the first and the products of whole chunks."""
    states = [state.flatten(0, 1)]
    for chunk, product in enumerate(span.chunk_major(products.view(span.lanes))[:-1]):
        states.append(product if chunk in span.cut else torch.bmm(states[-1], product))
    return span.lane_major(states)


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
