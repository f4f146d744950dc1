"""What `encoder` and `language_model` have in common: training steps of whole models, forward and backward."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from matmix.benchmarks.kernels.scan import flash_only
from matmix.benchmarks.measuring.command import parser_of, run_command
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.suite import Candidate, Case
from matmix.data.loading.batch import Batch
from matmix.model import ModelConfig, build_model, initialize
from matmix.train.activation import compile_blocks, compute_in_bfloat16
from matmix.train.config import ObjectiveConfig
from matmix.train.tasks import make_task

TOKENS = 32768


def step_of(
    title: str,
    model_config: ModelConfig,
    objective: ObjectiveConfig,
    batch: Batch,
    settings: Settings,
    *,
    compiled: bool,
    ours: bool,
) -> Candidate:
    """A model with its weights; `run` is its forward pass to the mean loss."""
    model = build_model(model_config, device=settings.device)
    initialize(model, 0)
    if compiled:
        compile_blocks(model, dynamic=False)
    if settings.dtype != torch.float32:
        compute_in_bfloat16(model, settings.device)
    task = make_task(objective, model_config)
    targets = task.count_targets(batch)

    def run() -> Tensor:
        with flash_only(settings.device):
            return task.loss(model, batch).total / targets

    leaves = list(model.parameters())
    facts = {"parameters": sum(leaf.numel() for leaf in leaves)}
    return Candidate(name=title, run=run, leaves=leaves, compared=ours, facts=facts)


def steps_of(
    models: dict[str, ModelConfig], objective: ObjectiveConfig, batch: Batch, settings: Settings
) -> list[Candidate]:
    """A candidate per model, the first of them ours, and one with compiled blocks."""
    candidates = []
    for title, config in models.items():
        for compiled in (False, True) if settings.compile else (False,):
            words = f"{title}, compiled" if compiled else title
            if settings.wanted(words):
                ours = title == "ours"
                candidates.append(step_of(words, config, objective, batch, settings, compiled=compiled, ours=ours))
    return candidates


def step_parser(command: str, description: str, lengths: str) -> argparse.ArgumentParser:
    """The common arguments and --layers."""
    parser = parser_of(command, description, lengths)
    parser.set_defaults(tokens=TOKENS)
    parser.add_argument("--layers", type=int, default=None, help="depth of all models (default: their own)")
    return parser


def run_steps(command: str, options: argparse.Namespace, cases: Callable[[Settings], Iterable[Case]]) -> None:
    """Check what only whole models ask for, and measure."""
    if options.dtype == "float16":
        raise ValueError("--dtype float16: training runs in bfloat16 or float32")
    if options.layers is not None and options.layers < 1:
        raise ValueError(f"--layers {options.layers}: must be 1 or more")
    run_command(command, options, cases, floors=False)
