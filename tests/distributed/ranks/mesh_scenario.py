"""Runs on a mesh with a dimension more, for the processes of test_mesh.

The dimension, and what an engine does along it, stand here; nothing else of the project knows of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.train import loop
from matmix.train.engine import mesh
from matmix.train.engine.fsdp import FsdpEngine
from matmix.train.engine.full_state import fill
from matmix.train.engine.mesh import Dimension
from matmix.train.engine.sharded_files import ShardedFiles
from matmix.train.engine.sharded_writer import write_sharded
from matmix.train.optim.base import local_part
from matmix.train.recipe import load_config


class HalfOfTheTargets(FsdpEngine):
    """Each of the two ranks computes the losses of every other position of the same batch."""

    def part_of_batch(self, batch: Batch) -> Batch:
        place = self.mesh.place("toy")
        labels = batch.labels.clone()
        labels[:, place::2] = IGNORED
        return dataclasses.replace(batch, labels=labels, n_tokens=(batch.n_tokens + place) // 2)


class ShareOfTheGradients(FsdpEngine):
    """Both ranks compute all losses, and one of them a quarter, the other three quarters of the gradients."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        super().backward(loss * (0.75 if self.mesh.place("toy") else 0.25), last=last)

    def step(self, max_norm: float) -> torch.Tensor:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(local_part(parameter.grad), group=self.mesh.group("toy"))
        return super().step(max_norm)


TOYS = {
    "parts of batches and weights": (Dimension("toy", 2, batches="part", shards=True), HalfOfTheTargets),
    "parts of batches": (Dimension("toy", 2, batches="part"), HalfOfTheTargets),
    "parts of gradients": (Dimension("toy", 2, batches="same"), ShareOfTheGradients),
}


def train_all(runs: list[tuple[str, list[str]]], toy: str) -> None:
    """Starts runs (recipe, overrides) one after the other, on a mesh with the toy as its innermost dimension; "" = on
    one without."""
    with pytest.MonkeyPatch.context() as patch:
        if toy:
            dimension, kind = TOYS[toy]
            usual = mesh.dimensions_of
            patch.setattr(mesh, "dimensions_of", lambda config, ranks: (*usual(config, ranks // 2), dimension))
            patch.setattr(loop, "build_engine", kind)
        for recipe, overrides in runs:
            loop.train(load_config(recipe, overrides))


def saved_in_columns(directory: str) -> list[bool]:
    """Saves a matrix that is cut into columns, and fills one that is cut so, one in rows and one that is not cut from
    it: whether each is what was saved."""
    ranks = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(15.0).view(3, 5)
    write_sharded({"model.weight": distribute_tensor(whole, ranks, [Shard(1)])}, Path(directory))
    files = ShardedFiles(Path(directory), {"shapes": {"weight": [3, 5]}, "moments": {}})
    same = []
    for placement in (Shard(1), Shard(0), Replicate()):
        tensor = distribute_tensor(torch.zeros(3, 5), ranks, [placement])
        fill(tensor, files, "model.weight")
        same.append(torch.equal(tensor.full_tensor(), whole))
    return same
