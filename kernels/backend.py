"""Chooses the implementation of an op.

Every op has a PyTorch form that runs on any device; most have Triton kernels too. "auto" takes the kernels for
CUDA (or ROCm) tensors and the PyTorch form for everything else. The answer is the same, to rounding.

Triton is imported only when its kernels are first needed, so that `import matmix` stays quick and works where
Triton does not exist. With TRITON_INTERPRET=1 in the environment, `backend="triton"` runs the kernels in
Triton's interpreter on CPU tensors: slow, but enough to check them without a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]
BACKENDS = ("auto", "torch", "triton")

# Found out once: torch.compile cannot trace the search.
_TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None

TRITON_FORMS: dict[str, str] = {}
"""Name of a registered operation -> the module that is its Triton form; each operation's file adds its own."""


class Forms:
    """The two forms of an operation: functions in PyTorch, and in a module those of the same meaning in Triton."""

    def __init__(
        self,
        op: str,
        triton: str,
        forward: Callable | None = None,
        backward: Callable | None = None,
        suffix: str = "",
    ):
        """
        Args:
            op: name of the registered operation.
            triton: the module, below `matmix.kernels`, whose functions `forward` and `backward` are the Triton form; it
                is imported when it is first needed.
            forward, backward: the PyTorch form; None where the operation runs in Triton only, or has no such half.
            suffix: what the names of the module's functions end with.
        """
        self.op, self.module, self.suffix = op, f"matmix.kernels.{triton}", suffix
        self.torch_form = {"forward": forward, "backward": backward}
        TRITON_FORMS[op] = self.module

    def choose(self, half: Literal["forward", "backward"], backend: str, like: Tensor, why_not: str = "") -> Callable:
        """Returns the function that computes the forward or the backward pass for inputs with the dtype and device of
        `like`.

        Called inside the registered op, where the tensors are real. `why_not` says what about the inputs the kernels
        cannot do, if anything. Raises ValueError when `backend` is "triton" and cannot be had.
        """
        if backend == "triton":
            check_backend(self.op, backend, like, why_not)
        tell_fallback(self.op, backend, like, why_not)
        if why_not or not takes_triton(backend, like):
            torch_form = self.torch_form[half]
            assert torch_form is not None
            return torch_form
        return getattr(self.triton, f"{half}{self.suffix}")

    @property
    def triton(self) -> ModuleType:
        """The module that is the Triton form."""
        return importlib.import_module(self.module)


def tell_fallback(op: str, backend: str, like: Tensor, why_not: str) -> None:
    """Warn, once for each reason, where inputs like this one would take the Triton form if `why_not` were empty."""
    if why_not and takes_triton(backend, like) and not torch.compiler.is_compiling():
        _warn_once(f"{op}: its Triton form {why_not}; its PyTorch form is used, which is slower")


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def takes_triton(backend: str, like: Tensor) -> bool:
    """Returns whether an op runs its Triton form on inputs like this one (fake tensors too), if it has one for them."""
    return backend != "torch" and (like.is_cuda or backend == "triton") and not _no_triton(like)


def check_backend(op: str, backend: str, like: Tensor, why_not: str = "") -> None:
    """Raise ValueError, before anything runs, for an unknown backend or one that cannot serve `like`."""
    if backend not in BACKENDS:
        raise ValueError(f"{op}: backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    reason = (_no_triton(like) or why_not) if backend == "triton" else ""
    if reason:
        raise ValueError(f'{op}: backend "triton" {reason}; use backend="auto"')


def _no_triton(like: Tensor) -> str:
    """The reason why Triton kernels cannot take tensors like this one; empty if they can."""
    if not _TRITON_IS_INSTALLED:
        return "needs the package triton, which is not installed"
    if not like.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs CUDA tensors, got one on {like.device}"
    if like.dtype == torch.float64:
        return "has no float64 kernels"
    return ""
