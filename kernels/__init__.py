"""The operations: scans over the sequence and the small operations around them, functions of plain tensors.

Every op has a definition (float64, easy to check), a PyTorch form that runs on any device and, for most, Triton
kernels; `backend="auto"` chooses.
"""

from matmix.kernels.gated_norm.op import gated_norm
from matmix.kernels.lion.op import lion_mixer, lion_mixer_is_fused
from matmix.kernels.matrix_product.op import matrix_product_scan
from matmix.kernels.mru.op import mru_mixer, mru_mixer_is_fused
from matmix.kernels.mru.step import mru_step
from matmix.kernels.scan_layer.op import scan_layer, scan_layer_is_fused
from matmix.kernels.semiseparable.op import quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.step import semiseparable_step
from matmix.kernels.short_conv.op import short_conv
from matmix.kernels.short_conv.step import short_conv_step

__all__ = [
    "gated_norm",
    "lion_mixer",
    "lion_mixer_is_fused",
    "matrix_product_scan",
    "mru_mixer",
    "mru_mixer_is_fused",
    "mru_step",
    "quasiseparable_scan",
    "scan_layer",
    "scan_layer_is_fused",
    "semiseparable_scan",
    "semiseparable_step",
    "short_conv",
    "short_conv_step",
]
