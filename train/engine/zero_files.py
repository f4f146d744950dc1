"""DeepSpeed's checkpoint files: written without raising, read without unpickling, converted, and read without
ranks."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from matmix.train.engine.sharded_files import find_os_error

SUBDIRECTORY = "zero"


def _known_classes() -> list[type]:
    """The classes, apart from tensors and plain values, whose instances DeepSpeed keeps in its files."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def load_file(path: str | Path, *, plain: bool = False, mapped: bool = True) -> dict[str, Any]:
    """Contents of one file; nothing is unpickled but tensors, plain values and the known classes.

    plain: not even those classes, which spares the import of DeepSpeed. mapped: tensors stay on the disk and
    are read when touched.
    """
    with torch.serialization.safe_globals([] if plain else _known_classes()):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def make_files() -> Any:
    """What a DeepSpeed engine reads and writes its files with (a class of DeepSpeed's, hence made late)."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Files(TorchCheckpointEngine):
        failure: Exception | None = None

        def save(self, state_dict: Any, path: str) -> None:
            with self._keeping_failures(), open(path, "wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            with self._keeping_failures():
                os.makedirs(path, exist_ok=exist_ok)

        @contextlib.contextmanager
        def _keeping_failures(self) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                # Raised by the engine once all ranks are through.
                self.failure = self.failure or find_os_error(error) or error

        def load(self, path: str, map_location: Any = None) -> Any:
            return load_file(path, mapped=False)

    return Files()


def convert_to_universal(directory: Path, target: Path) -> None:
    """Writes the universal form of the DeepSpeed files in `directory` below `target`, in this process
    alone."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    source = directory / SUBDIRECTORY
    for path in source.glob("*.pt"):
        load_file(path)  # the converter unpickles: let it see nothing that would not load safely
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target / SUBDIRECTORY),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)


def iterate_zero(directory: Path, layout: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full CPU tensor of everything in layout["shapes"], one at a time, in one process."""
    source, wanted = directory / SUBDIRECTORY, layout["shapes"]
    if layout["zero_stage"] < 3:
        module = load_file(source / "mp_rank_00_model_states.pt", plain=True)["module"]
        yield from ((name, module[name].clone()) for name in wanted)
        return
    ranks = range(layout["world_size"])
    first = load_file(source / "zero_pp_rank_0_mp_rank_00_model_states.pt", plain=True)
    groups = [
        load_file(source / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"][
            "fp32_flat_groups"
        ]
        for rank in ranks
    ]
    for number, shapes in enumerate(first["param_shapes"]):
        offset = 0
        for name, shape in shapes.items():
            # Each rank holds an equal piece of every tensor, the last one padded, one tensor after the other.
            numel, piece = shape.numel(), -(-shape.numel() // len(ranks))
            pieces = [groups[rank][number].detach()[offset : offset + piece] for rank in ranks]
            yield name, torch.cat(pieces)[:numel].view(shape)
            offset += piece
    yield from ((name, first["module"][name].clone()) for name in wanted if name in first["buffer_names"])
