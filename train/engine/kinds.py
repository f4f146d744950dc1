"""The kinds of engines, by the names that checkpoints give them: what each writes and holds, without making one, and
what reads the files of any checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from matmix.train.engine import full_tensors
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.costs import Exchange, Held, Sizes, held_by_fsdp, sent_by_fsdp
from matmix.train.engine.deepspeed.costs import held_by_zero, sent_by_zero
from matmix.train.engine.deepspeed.files import ZeroFiles
from matmix.train.engine.full_state import AveragedState, CheckpointFiles, FullState, Weights


def sharded_files() -> ModuleType:
    """The module of torch's sharded files. It is imported with the first checkpoint that is read or written: it takes
    half a second, which a start has no use for."""
    from matmix.train.engine import sharded_files

    return sharded_files


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Engines of one kind read each other's checkpoints."""

    find_files: Callable[[], type[CheckpointFiles]]
    """Imports `files`."""
    held: Callable[[EngineConfig, int, Sizes], Held]
    """What a rank holds of a model, from the config, the number of ranks and the model's sizes."""
    sent: Callable[[EngineConfig, int, Sizes], list[Exchange]]
    """What several ranks send in a step."""

    @property
    def files(self) -> type[CheckpointFiles]:
        """What reads the files of its checkpoints."""
        return self.find_files()


KINDS = {
    "torch": Kind(find_files=lambda: sharded_files().ShardedFiles, held=held_by_fsdp, sent=sent_by_fsdp),
    "deepspeed": Kind(find_files=lambda: ZeroFiles, held=held_by_zero, sent=sent_by_zero),
}

_FORMS = {full_tensors.KIND: lambda: full_tensors.FullTensorFiles} | {
    name: kind.find_files for name, kind in KINDS.items()
}


def files_of(layout: Mapping[str, Any]) -> type[CheckpointFiles]:
    """What reads the files of a checkpoint of this layout. Raises ValueError where its engine is none of ours."""
    if layout["engine"] not in _FORMS:
        raise ValueError(f"no engine is called {layout['engine']!a}")
    return _FORMS[layout["engine"]]()


def open_full(checkpoint: Path, layout: Mapping[str, Any], *, weights_only: bool = False) -> FullState:
    """The full tensors of a checkpoint of any kind; see `CheckpointFiles`."""
    return files_of(layout)(checkpoint, layout, weights_only=weights_only)


def open_weights(checkpoint: Path, layout: Mapping[str, Any], weights: Weights = "raw") -> FullState:
    """The weights and buffers of a checkpoint of any kind. Averages lie with what the optimizer keeps, so that all
    files must be there. Raises ValueError (one line) where the checkpoint has none."""
    if weights == "raw":
        return open_full(checkpoint, layout, weights_only=True)
    return AveragedState(open_full(checkpoint, layout), f"checkpoint {checkpoint}")


def index_files(files: Iterable[str]) -> list[str]:
    """Those of a checkpoint's `files` that say what lies in the others."""
    return [name for form in _FORMS.values() for name in form().index_files(files)]


def weight_files(checkpoint: Path, layout: Mapping[str, Any], files: Iterable[str]) -> list[str]:
    """Those of a checkpoint's `files`, of which the `index_files` are there, that must be read for its weights."""
    return files_of(layout).weight_files(checkpoint, layout, files)
