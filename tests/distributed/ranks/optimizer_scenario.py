"""Runs with the toy optimizers, in processes of their own."""

from __future__ import annotations

import run_scenarios
import toy_momentum

from matmix.train.optim import OPTIMIZERS


def register() -> None:
    """Does what a line in the table of optimizers would do."""
    OPTIMIZERS["momentum"] = toy_momentum.Momentum
    OPTIMIZERS["whole"] = toy_momentum.WholeMatrices


def train_all(runs: list[tuple[str, list[str]]]) -> None:
    register()
    run_scenarios.train_all(runs)
