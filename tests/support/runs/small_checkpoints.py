"""A small run's checkpoint, and what someone who can write to it may make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import MANIFEST, describe_files, list_files, read_manifest, write_manifest
from matmix.train.engine.base import Engine
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.optim.adamw import AdamW
from matmix.train.process.distributed import Distributed


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 2)])
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x).sum() * self.scale


def make_engine() -> Engine:
    """A model that has been updated once, in this process alone."""
    engine = build_engine(EngineConfig(), Distributed(0, 1, 0, torch.device("cpu")))
    engine.prepare(Tiny(), lambda model: None, lambda model: AdamW(model.named_parameters()))
    engine.backward(engine.model(torch.ones(3)).sum(), last=True)
    engine.step(1.0)
    return engine


def save(directory: Path, step: int = 2) -> Path:
    """A checkpoint of `make_engine`."""
    path = CheckpointManager(directory, keep_last=9).save(step, make_engine(), {"samples": 48})
    assert path is not None
    return path


def rehash(checkpoint: Path, **changes: Any) -> None:
    """Makes every hash fit what is there now, and replaces members of the manifest."""
    manifest = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    files = describe_files(checkpoint, list_files(checkpoint))
    write_manifest(checkpoint, {**manifest, "files": files, **changes})
