"""Which ranks share the folder that a run is written to: all of them, or those of one node."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from matmix.data.storage.remote import scratch_folder
from matmix.train.process.distributed import rank_and_world_size


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A folder among those that the ranks of a run write to, and this rank among those that share it."""

    number: int  # of the folder
    index: int  # of this rank among those that share it
    count: int  # of them

    @property
    def leads(self) -> bool:
        """Whether this rank makes, renames and clears what is in the folder."""
        return self.index == 0

    @classmethod
    def shared(cls) -> Place:
        """One folder that all ranks see."""
        return cls(0, *rank_and_world_size())

    @classmethod
    def of_node(cls) -> Place:
        """A folder for each node, from what launchers say in GROUP_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE."""
        rank, world_size = rank_and_world_size()
        count = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
        return cls(int(os.environ.get("GROUP_RANK") or 0), int(os.environ.get("LOCAL_RANK") or rank), count)


def mirror_folder(url: str, node: int | str | None = None) -> Path:
    """This node's folder for a run at a URL. Its number keeps apart nodes whose cache folder is one and the same.

    node: None = as GROUP_RANK says.
    """
    return scratch_folder("runs", url) / f"node-{int(os.environ.get('GROUP_RANK') or 0) if node is None else node}"
