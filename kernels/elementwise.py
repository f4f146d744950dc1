"""Functions of single numbers that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_one_plus(x):
    """log(1 + x) for x >= 0, with all digits where x is small."""
    whole = 1.0 + x
    # The rounding of 1 + x is taken back (Kahan).
    return tl.where(whole == 1.0, x, tl.log(whole) * (x / tl.where(whole == 1.0, 1.0, whole - 1.0)))
