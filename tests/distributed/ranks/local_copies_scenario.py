"""Starts of a run on several nodes that are killed, for the processes of these tests: a node's memory is a folder."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import scenarios
from folders import flip_a_bit
from messages import Heard

from matmix.train import loop
from matmix.train.checkpoint import local_copies
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.guards.steps import NanGuard
from matmix.train.process.distributed import barrier
from matmix.train.recipe import load_config


class Killed(Exception):
    """Stands for the end of all processes at the same moment."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One start: what happens to the nodes before it, what is changed of the config, and when it is killed."""

    kill: int | None = None
    lost: tuple[int, ...] = ()
    """Nodes that are others now."""
    damaged: tuple[tuple[int, str], ...] = ()
    """(node, pattern): a bit of each such file of its copies is another now."""
    begun: tuple[tuple[int, str], ...] = ()
    """(node, pattern): of each such file of its copies only the beginning is there, as where a start was killed that
    was being sent it."""
    overrides: tuple[str, ...] = ()


def train_on_nodes(
    folder: str, ranks_per_node: int, common: list[str], starts: list[Start]
) -> list[tuple[list[str], set[str]]]:
    """What each start said, on rank 0, and the names of the files that the node then holds; the same processes do all
    of them."""
    rank = int(os.environ["RANK"])
    node = rank // ranks_per_node
    places = {"GROUP_RANK": node, "LOCAL_RANK": rank % ranks_per_node, "LOCAL_WORLD_SIZE": ranks_per_node}
    os.environ.update({name: str(value) for name, value in places.items()})
    scenarios.partition_everything()
    home = Path(folder) / f"memory-{node}"
    local_copies._memory_folder = lambda: home
    begin_copy, on_step = CheckpointManager.begin_copy, NanGuard.after_step
    said: list[list[str]] = []
    held: list[set[str]] = []

    def begin_and_wait(self, *arguments):
        self.wait()  # so that no copy is left out
        begin_copy(self, *arguments)
        self.wait()

    def step(self, trainer):
        on_step(self, trainer)
        if trainer.state.step == starts[len(said) - 1].kill:
            raise Killed

    heard = Heard()
    heard.addFilter(lambda record: not record.name.endswith(".health"))
    heard.addFilter(lambda record: record.funcName != "say_what_begins")
    CheckpointManager.begin_copy, NanGuard.after_step = begin_and_wait, step
    for start in starts:
        if rank % ranks_per_node == 0:
            if node in start.lost:
                shutil.rmtree(home, ignore_errors=True)
            for number, pattern in start.damaged:
                for path in home.rglob(pattern) if number == node else ():
                    flip_a_bit(path)
            for number, pattern in start.begun:
                for path in home.rglob(pattern) if number == node else ():
                    os.truncate(path, path.stat().st_size // 2)
        barrier()
        said.append([])
        heard.then = lambda: said[-1].append(heard[-1])
        options = ["--checkpoint.local-every", "1", "--logging.progress", "False", *start.overrides]
        try:
            loop.train(load_config("debug_mru", [*common, *options]))
            assert start.kill is None
        except Killed:
            pass
        barrier()
        held.append({path.name for path in home.rglob("*") if path.is_file()})
        barrier()
    return list(zip(said, held, strict=True))
