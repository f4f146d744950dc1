"""Gradients of pairs of tokens in the two tiles of a chunk: writers in one, readers in the other.

All of them meet across the edge between the tiles, so that the decay of a pair is the product of two numbers, one of
its writer and one of its reader. These go to values and cotangents before they are multiplied, and no matrix of pairs
has to be weighted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import edge_sum, exponents, load_rows, side_scores, write_sums


@triton.jit
def cross_scores(
    q, q_l, k, k_l, place, left, ahead, forward,
    SHIFT: tl.constexpr, TILE: tl.constexpr, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (TILE, TILE) of this tile's writers (rows) and the other one's readers, typed like q and k, and the same
    turned round in float32. The other tile is `ahead` of this one, and reads in the direction that runs `forward` or
    not."""
    i = tl.arange(0, TILE)
    valid = i < left
    source = i + ahead
    readable = source < left
    if SHIFT:
        source += tl.where(forward, -1, 1)
        readable = readable & (source < left) & (source >= -place)
    c = load_rows(k, k_l, i, valid, 0, D_STATE, BLOCK_N)
    x = load_rows(q, q_l, source, readable, 0, D_STATE, BLOCK_N)
    scores = side_scores(c, k, k_l, q, q_l, i, valid, source, readable, D_STATE, TILE, BLOCK_N, PRECISION)
    turned = side_scores(x, q, q_l, k, k_l, source, readable, i, valid, D_STATE, TILE, BLOCK_N, PRECISION)
    return scores.to(x.dtype), turned


@triton.jit
def cross_decays(
    sums, r0, ahead, forward,
    TWO: tl.constexpr, SHIFT: tl.constexpr, GATED1: tl.constexpr, GATED2: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(TILE,) decays between this tile's writers and the edge, and between the edge and the other tile's readers.
    `sums` are the first direction's; the second one's follow."""
    i = tl.arange(0, TILE)
    writes = i * 0.0 + 1.0
    reads = writes
    if GATED1 or GATED2:
        edge_high, edge_low = edge_sum(sums, tl.where(forward, TILE - 1, TILE), CHUNK, EXACT)
        high, low = write_sums(sums + r0, i, CHUNK, EXACT)
        decays = tl.exp2(exponents(edge_high, edge_low, high, low, EXACT))
        step = tl.where(forward, -1, 1) if SHIFT else 0
        high, low = write_sums(sums + (r0 + ahead + step), i, CHUNK, EXACT)
        until = tl.exp2(exponents(high, low, edge_high, edge_low, EXACT))
        if TWO and GATED1 != GATED2:
            gated = forward if GATED1 else forward == False  # noqa: E712 (a tensor)
            writes = tl.where(gated, decays, writes)
            reads = tl.where(gated, until, reads)
        else:
            writes = decays
            reads = until
    return writes, reads


@triton.jit
def cross_values(out, pairs, written, scores, value, grad, writes, reads, PRECISION: tl.constexpr):
    """What BLOCK_P channels add to the gradient of this tile's values (TILE, BLOCK_P), to the products (TILE, TILE) of
    the other tile's weighted cotangents (rows) and the values, and to the sum (TILE,) over the pairs of a writer,
    before its own decay and input scale.

    `writes` and `reads` weight the values of this tile and the cotangents `grad` of the other one.
    """
    reading = (grad.to(tl.float32) * reads[:, None]).to(value.dtype)
    pairs = tl.dot(reading, tl.trans(value), acc=pairs, input_precision=PRECISION)
    met = tl.dot(scores, reading, input_precision=PRECISION)
    written += tl.sum(met * value.to(tl.float32), 1)
    return out + met * writes[:, None], pairs, written
