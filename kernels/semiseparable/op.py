"""The semiseparable (SSD) and quasiseparable (Hydra, LION) scans as ops."""

from matmix.kernels.semiseparable.bidirectional import quasiseparable_scan
from matmix.kernels.semiseparable.causal import semiseparable_scan

__all__ = ["quasiseparable_scan", "semiseparable_scan"]
