"""Runs in which the states of one layer overflow on the last rank alone, for the processes of a test."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import scenarios

from matmix.train import loop
from matmix.train.errors import NonFiniteError
from matmix.train.recipe import load_config
from matmix.train.tasks.token_prediction import TokenPrediction


def enlarge(_mixer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0] * 1e20, *inputs[1:])


def overflow_on_the_last_rank(runs: dict[str, list[str]], step: int, layer: int) -> dict[str, tuple[str, str]]:
    """For each run of debug_mru: the error that ends it, and what this rank has shown before."""
    scenarios.partition_everything()
    true_loss, found = TokenPrediction.loss, {}
    for name, overrides in runs.items():
        calls: list[None] = []

        def compute_loss(task, model, batch, calls=calls):
            calls.append(None)
            module = getattr(model, "module", model)
            # Of the two micro-batches of a step the first; from this step on, in every one.
            bad = len(calls) % 2 == 1 and len(calls) > 2 * (step - 1) and scenarios.place().rank == 1
            if not bad:
                return true_loss(task, model, batch)
            with module.blocks[layer].mixer.register_forward_pre_hook(enlarge):
                return true_loss(task, model, batch)

        TokenPrediction.loss = compute_loss
        shown = io.StringIO()
        try:
            with contextlib.redirect_stderr(shown):
                loop.train(load_config("debug_mru", overrides))
            error = ""
        except NonFiniteError as caught:
            error = str(caught)
        finally:
            TokenPrediction.loss = true_loss
        found[name] = error, shown.getvalue()
    return found
