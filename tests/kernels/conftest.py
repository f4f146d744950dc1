"""Lets the test files below this folder import each other's helpers, whatever pytest's import mode."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from triton_on_cpu import PoisonedTorch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "scan"), str(HERE / "mru"), str(HERE / "layer")]


@pytest.fixture
def poisoned(monkeypatch) -> None:
    """Buffers that the scans' kernels are to fill start out as NaN, so that an element never written shows."""
    from matmix.kernels.semiseparable.fused import launch, scan, states

    for module in (launch, scan, states):
        monkeypatch.setattr(module, "torch", PoisonedTorch())
