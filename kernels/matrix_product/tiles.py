"""Products of small tiles in Triton kernels, as exact as float32 and with few instructions around them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(x):
    """Two numbers whose sum is x, of which the first has as many bits as tensor cores read of float32."""
    rounded = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    large = rounded.to(tl.float32, bitcast=True)
    return large, x - large


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """a b as exact as float32. The compiler's own tf32x3 takes half as many instructions more, as with it infinities
    stay what they are, which here may become NaN."""
    if PRECISION == "tf32x3":
        a_large, a_small = split(a)
        b_large, b_small = split(b)
        c = tl.dot(a_small, b_large, input_precision="tf32")
        c = tl.dot(a_large, b_small, acc=c, input_precision="tf32")
        c = tl.dot(a_large, b_large, acc=c, input_precision="tf32")
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def turned_places(TILE: tl.constexpr):
    """The columns of a tile in the order in which `turned` puts them."""
    i = tl.arange(0, TILE)
    return i // 8 * 8 + i % 4 * 2 + i // 4 % 2


@triton.jit
def turned(x, TILE: tl.constexpr):
    """The columns of a tile in another order: a lane of a tensor core then has the numbers that it needs to multiply a
    product again, by a tile whose rows are in this order, and they need not be exchanged."""
    return tl.reshape(tl.permute(tl.reshape(x, (TILE, TILE // 8, 4, 2)), (0, 1, 3, 2)), (TILE, TILE))
