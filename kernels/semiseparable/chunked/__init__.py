"""The scans in PyTorch, chunk by chunk, on any device."""

from matmix.kernels.semiseparable.chunked.autograd import quasiseparable_chunked, semiseparable_chunked

__all__ = ["quasiseparable_chunked", "semiseparable_chunked"]
