"""Runs of the debug recipes through the real loop, for the processes of these tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch

from matmix.data.loading.batch import Batch
from matmix.train import activation, loop
from matmix.train.process.distributed import gather_objects
from matmix.train.recipe import load_config
from matmix.train.run.directory import MovedError

GlobalBatches = dict[int, list[int]]
"""Step -> a checksum of each sequence that the step read, over all ranks, in the order of the global batch."""


def train_all(runs: list[tuple[str, list[str]]]) -> list[GlobalBatches]:
    """Starts each of the runs (recipe, overrides) after the other."""
    scenarios.partition_everything()
    return [_train(recipe, overrides) for recipe, overrides in runs]


def train_compiled(runs: list[tuple[str, list[str]]]) -> None:
    """Starts each of the runs, with the tracing and the autograd of the compiler but without its code generator."""
    compiled = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation.torch, "compile", lambda function: compiled(function, backend="aot_eager"))
        scenarios.train_recipes(runs)


def _train(recipe: str, overrides: list[str]) -> GlobalBatches:
    found: GlobalBatches = {}
    true_step = loop.Trainer.train_step

    def train_step(trainer: loop.Trainer, batches: Iterator[Batch]) -> None:
        read: list[int] = []

        def watched() -> Iterator[Batch]:
            for batch in batches:
                read.extend(checksums(batch))
                yield batch

        true_step(trainer, watched())
        found[trainer.state.step] = [row for rows in gather_objects(read) for row in rows]

    loop.Trainer.train_step = train_step
    try:
        loop.train(load_config(recipe, overrides))
    finally:
        loop.Trainer.train_step = true_step
    return found


def checksums(batch: Batch) -> list[int]:
    """One for each sequence, of its tokens, its labels and the borders of its documents."""
    rows, length = batch.input_ids.shape
    found = []
    for row in range(rows):
        parts: list[Any] = [batch.input_ids[row].tolist(), batch.labels[row].tolist()]
        if batch.cu_seqlens is not None:
            first, end = row * length, (row + 1) * length
            parts.append([border - first for border in batch.cu_seqlens.tolist() if first <= border < end])
        if batch.attention_mask is not None:
            parts.append(batch.attention_mask[row].tolist())
        found.append(zlib.crc32(repr(parts).encode()))
    return found


def move_all(runs: list[tuple[str, list[str]]], step: int, again: list[tuple[str, list[str]]]) -> list[str]:
    """Starts each of the runs, which ends as rank 1 moves its directory to a folder called elsewhere after `step` is
    begun and makes an empty one in its place; then those in `again`. What each of the first said."""
    scenarios.partition_everything()
    true_step = loop.Trainer.compute_step

    def compute_step(trainer: loop.Trainer, batches: Iterator[Batch]) -> None:
        if trainer.state.step + 1 == step and trainer.engine.rank == 1:
            path = Path(trainer.config.run_dir)
            path.rename(path.with_name("elsewhere"))
            path.mkdir()
        true_step(trainer, batches)

    told = []
    loop.Trainer.compute_step = compute_step
    try:
        for recipe, overrides in runs:
            with pytest.raises(MovedError) as error:
                loop.train(load_config(recipe, overrides))
            told.append(str(error.value))
    finally:
        loop.Trainer.compute_step = true_step
    for recipe, overrides in again:
        loop.train(load_config(recipe, overrides))
    return told
