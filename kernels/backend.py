"""Choice of implementation for an op.

Every op has a PyTorch form that runs on any device. Hand-written Triton kernels register themselves with
`provide_triton`; "auto" then takes them for CUDA tensors and the PyTorch form for everything else. The answer
is the same from every backend, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

Backend = Literal["auto", "torch", "triton"]
BACKENDS = ("auto", "torch", "triton")

_triton_kernels: dict[str, Callable] = {}


def provide_triton(op: str, kernel: Callable) -> None:
    """Make `kernel` the Triton implementation of the half-op `op`, e.g. "matrix_product_scan.forward"."""
    _triton_kernels[op] = kernel


def implementation(op: str, torch_form: Callable, backend: str, tensor: Tensor) -> Callable:
    """The function that computes `op` for inputs living where `tensor` lives.

    Called inside the registered op, where the tensors are real. Raises ValueError when `backend` is "triton"
    and cannot be had.
    """
    if backend == "torch":
        return torch_form
    kernel = _triton_kernels.get(op) if tensor.is_cuda else None
    if kernel is None and backend == "triton":
        raise ValueError(_why_no_triton(op, tensor))
    return kernel or torch_form


def check_backend(op: str, backend: str, tensor: Tensor) -> None:
    """Raise ValueError, before anything runs, for an unknown backend or one that cannot serve `tensor`."""
    if backend not in BACKENDS:
        raise ValueError(f"{op}: backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend == "triton" and not (tensor.is_cuda and f"{op}.forward" in _triton_kernels):
        raise ValueError(_why_no_triton(op, tensor))


def _why_no_triton(op: str, tensor: Tensor) -> str:
    if not tensor.is_cuda:
        return f'{op}: backend "triton" needs CUDA tensors, got one on {tensor.device}; use backend="auto"'
    return f'{op}: there is no Triton kernel for this op; use backend="auto"'
