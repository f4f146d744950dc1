"""The kinds of engines, by the names that checkpoints give them: what each writes and holds, without making one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from matmix.train.engine.config import EngineConfig
from matmix.train.engine.deepspeed.files import ZeroFiles
from matmix.train.engine.deepspeed.held import held_by_zero
from matmix.train.engine.full_state import CheckpointFiles
from matmix.train.engine.held import Held, Sizes, held_by_fsdp
from matmix.train.engine.sharded_files import ShardedFiles


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Engines of one kind read each other's checkpoints."""

    files: type[CheckpointFiles]
    """What reads the files of its checkpoints."""
    held: Callable[[EngineConfig, int, Sizes], Held]
    """What a rank holds of a model, from the config, the number of ranks and the model's sizes."""


KINDS = {
    "torch": Kind(files=ShardedFiles, held=held_by_fsdp),
    "deepspeed": Kind(files=ZeroFiles, held=held_by_zero),
}
