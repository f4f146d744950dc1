"""Chooses the implementation of an op: "auto" takes Triton kernels, where there are some, for CUDA (or ROCm) tensors
and the PyTorch form for everything else. The answer is the same, to rounding.

Triton is imported only when its kernels are first needed, so that `import matmix` stays quick and works where Triton
does not exist. With TRITON_INTERPRET=1 in the environment, `backend="triton"` runs the kernels in Triton's interpreter
on CPU tensors: slow, but enough to check them without a GPU.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from matmix.kernels.functions import Form, Operation

BACKENDS = ("auto", "torch", "triton")

# Found out once: torch.compile cannot trace the search.
_TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None

TRITON_FORMS: dict[str, str] = {}
"""Name of a registered operation -> the module that is its Triton form; each operation's file adds its own."""


class Forms:
    """The two forms of an operation: one in PyTorch, and a module below `matmix.kernels` whose functions are the other,
    in Triton."""

    def __init__(
        self, operation: Operation, triton: str, why_not: Callable[[Any], str], suffix: str = "", listed: bool = True
    ):
        self.operation, self.why_not, self.suffix = operation, why_not, suffix
        self.module = f"matmix.kernels.{triton}"
        if listed:
            TRITON_FORMS[operation.name] = self.module

    def is_fused(self, backend: str, given: Any) -> bool:
        """Returns whether the Triton form runs for these inputs."""
        return self.operation.torch is None or (not self.why_not(given) and takes_triton(backend, given[0]))

    def choose(self, backend: str, given: Any) -> Form:
        """Returns the form that computes the operation for these inputs.

        Called inside the registered op, where the tensors are real. Raises ValueError when `backend` is "triton" and
        cannot be had.
        """
        if self.operation.torch is not None:
            name, like, why_not = self.operation.name, given[0], self.why_not(given)
            if backend == "triton":
                check_backend(name, backend, like, why_not)
            tell_fallback(name, backend, like, why_not)
            if why_not or not takes_triton(backend, like):
                return self.operation.torch
        module = importlib.import_module(self.module)
        return Form(*(getattr(module, f"{half}{self.suffix}", None) for half in Form._fields))


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
