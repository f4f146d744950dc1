"""The mathematics: scans and the small ops around them, from plain tensors to plain tensors.

Every op has a definition (float64, obviously right), a PyTorch form that runs on any device and, where there
is one, a Triton kernel; `backend="auto"` chooses.
"""

from matmix.kernels.gated_norm.op import gated_norm
from matmix.kernels.matrix_product.op import matrix_product_scan
from matmix.kernels.mru.op import mru_mixer, mru_mixer_is_fused
from matmix.kernels.mru.step import mru_step
from matmix.kernels.semiseparable.op import quasiseparable_scan, semiseparable_scan
from matmix.kernels.short_conv.op import short_conv

__all__ = [
    "gated_norm",
    "matrix_product_scan",
    "mru_mixer",
    "mru_mixer_is_fused",
    "mru_step",
    "quasiseparable_scan",
    "semiseparable_scan",
    "short_conv",
]
