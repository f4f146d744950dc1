"""Runs at a URL on several nodes, for the processes of these tests: a node is a folder of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import scenarios

from matmix.train import loop
from matmix.train.process.distributed import barrier
from matmix.train.recipe import load_config
from matmix.train.run import lock as lease


def train_on_nodes(
    environment: dict[str, str], folder: str, ranks_per_node: int, starts: list[tuple[list[int], list[str]]]
) -> list[list[str]]:
    """Starts runs one after the other; before each, the nodes listed lose all they have.

    starts: (nodes, overrides of debug_mru). Returns, for each start, the files that this rank's node holds after it.
    """
    import s3fs

    rank = int(os.environ["RANK"])
    node = rank // ranks_per_node
    home = Path(folder) / f"machine-{node}"
    places = {"GROUP_RANK": node, "LOCAL_RANK": rank % ranks_per_node, "LOCAL_WORLD_SIZE": ranks_per_node}
    os.environ.update({name: str(value) for name, value in places.items()}, **environment, MATMIX_SCRATCH=str(home))
    s3fs.S3FileSystem.retries = 1
    lease.SETTLE_SECONDS = 0.0
    scenarios.partition_everything()
    held = []
    for lost, overrides in starts:
        if node in lost and rank % ranks_per_node == 0:
            shutil.rmtree(home, ignore_errors=True)
        barrier()
        loop.train(load_config("debug_mru", overrides))
        barrier()  # one rank of a node removes its old checkpoints
        held.append(sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()))
        barrier()
    return held
