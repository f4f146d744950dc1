"""Packages that are only ever measured against (the extra `peers`): found where installed, named where not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

HOW = {
    "mamba-ssm": "pip install --no-build-isolation mamba-ssm",
    "causal-conv1d": "pip install --no-build-isolation causal-conv1d",
    "fla-core": "pip install fla-core",
}
"""Distribution -> how to get it. Only fla-core's operations are used: flash-linear-attention itself asks for a newer
transformers than the exports are made for."""


class Missing(Exception):
    """A peer cannot be used here; the message is what the table says."""


def peer(distribution: str, module: str, name: str) -> Callable[..., Any]:
    """A function of an optional package. Raises `Missing`."""
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        raise Missing(f"not installed: {HOW[distribution]}")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        if distribution != "mamba-ssm":
            raise Missing(f"{distribution} cannot be imported: {error}") from None
    try:
        # mamba_ssm imports the CUDA extension of another operation before anything else. Its SSD and its norm
        # are Triton and need only their source (MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install
        # --no-deps --no-build-isolation mamba-ssm), so the package is entered without running its __init__.
        for loaded in [key for key in sys.modules if key.split(".")[0] == package]:
            del sys.modules[loaded]
        found = importlib.util.find_spec(package)
        if found is None:  # what had been imported lies nowhere any more
            raise Missing(f"not installed: {HOW[distribution]}")
        sys.modules[package] = importlib.util.module_from_spec(found)
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        sys.modules.pop(package, None)
        raise Missing(f"{distribution} cannot be imported: {error}") from None
