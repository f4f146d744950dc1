"""Triton kernels for LION's gates: log-decays of both directions from logits, and the gradient of the logits.

A program takes a piece of a document and some heads. A gate may act one token later in its direction (an offset of 1):
then it is read at the neighbour's place in the document, and there is no decay where there is no neighbour.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.slots import located, log_one_plus


@triton.jit
def log_sigmoid(x):
    """-log(1 + exp(-x)), with all digits where it is small."""
    return tl.where(x > 0.0, 0.0, x) - log_one_plus(tl.exp(-tl.abs(x)))


@triton.jit
def _places(table, seqlen, per_row, heads, PACKED: tl.constexpr, SPAN: tl.constexpr, BLOCK_H: tl.constexpr):
    """First token's row, tokens in the document, its length, and heads."""
    piece, batch_row, begin, length = located(tl.program_id(0), table, seqlen, per_row, PACKED)
    token = piece * SPAN + tl.arange(0, SPAN)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    return batch_row.to(tl.int64) * seqlen + begin, token[:, None], length, head[None, :]


@triton.jit(do_not_specialize=["seqlen", "per_row"])
def log_gates(
    logits, forward, backward, table, seqlen, per_row, heads, stride,
    OFFSET: tl.constexpr, DELAY: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """forward and backward (tokens, heads) float32: the log-decay of a token is that of the token DELAY before it,
    backward that of the token OFFSET after it."""
    start, token, length, head = _places(table, seqlen, per_row, heads, PACKED, SPAN, BLOCK_H)
    mask = (token < length) & (head < heads)
    at = (start + token) * heads + head
    source = token - DELAY
    there = mask & (source >= 0)
    x = tl.load(logits + (start + source) * stride + head, there, other=0.0).to(tl.float32)
    tl.store(forward + at, tl.where(there, log_sigmoid(x), 0.0), mask)
    source = token + OFFSET
    there = mask & (source < length)
    x = tl.load(logits + (start + source) * stride + head, there, other=0.0).to(tl.float32)
    tl.store(backward + at, tl.where(there, log_sigmoid(x), 0.0), mask)


@triton.jit(do_not_specialize=["seqlen", "per_row"])
def gate_gradients(
    dforward, dbackward, logits, dlogits, table, seqlen, per_row, heads, stride,
    OFFSET: tl.constexpr, DELAY: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dlogits (tokens, heads)."""
    start, token, length, head = _places(table, seqlen, per_row, heads, PACKED, SPAN, BLOCK_H)
    mask = (token < length) & (head < heads)
    target = token + DELAY
    gradient = tl.load(dforward + (start + target) * heads + head, mask & (target < length), other=0.0)
    target = token - OFFSET
    gradient += tl.load(dbackward + (start + target) * heads + head, mask & (target >= 0), other=0.0)
    x = tl.load(logits + (start + token) * stride + head, mask, other=0.0).to(tl.float32)
    gradient *= tl.sigmoid(-x)
    tl.store(dlogits + (start + token) * heads + head, gradient.to(dlogits.dtype.element_ty), mask)
