"""DeepSpeed's checkpoint files, written and read without it: at any number of ranks, unpickling tensors alone."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from matmix.data.storage.files import open_durable
from matmix.train.engine.base import find_os_error
from matmix.train.engine.full_state import MODEL, OPTIMIZER, CheckpointFiles, Entry

SUBDIRECTORY = "zero"
# What looking into files of another form may raise.
_OF_NONSENSE = (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, RuntimeError, ValueError)


class _Ignored:
    """Stands in for objects in DeepSpeed's files that are neither tensors nor plain values; nobody reads them."""

    def __init__(self, *_arguments: Any) -> None:
        pass


_CLASSES = [
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load_file(path: Path) -> dict[str, Any]:
    """Returns the contents of one file: tensors, left on the disk until they are touched, and plain values alone."""
    with torch.serialization.safe_globals(_CLASSES):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


@contextlib.contextmanager
def _holding(directory: Path) -> Iterator[None]:
    """Turns what files of another form raise into a ValueError (one line); by accident they are none: hashes hold."""
    try:
        yield
    except _OF_NONSENSE as error:
        what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ValueError(f"checkpoint {directory} is damaged: its files are not DeepSpeed's ({what})") from None


def make_files() -> Any:
    """Returns what a DeepSpeed engine writes its files with, which keeps them in `contents`."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Files(TorchCheckpointEngine):
        contents: dict[str, Any]

        def save(self, state_dict: Any, path: str) -> None:
            self.contents[Path(path).name] = state_dict

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pass

    return Files()


def write_files(files: dict[str, Any], directory: Path, _group: dist.ProcessGroup | None) -> None:
    """Writes the contents of the files of this rank, given by their names."""
    folder = directory / SUBDIRECTORY
    folder.mkdir(exist_ok=True)
    for name, contents in files.items():
        try:
            with open_durable(folder / name) as file:
                torch.save(contents, file)
        except Exception as error:
            if (cause := find_os_error(error)) is None:
                raise
            raise cause from None


class ZeroFiles(CheckpointFiles):
    """Reads a DeepSpeed checkpoint of any stage and number of ranks in one process. From stage 1 on an optimizer's
    groups are flat: stages 1 and 2 lay a group's tensors one after the other and cut the whole into equal parts, one
    for each rank; stage 3 cuts every tensor, and lays a rank's parts one after the other."""

    engine_names = '"deepspeed"'

    def __init__(self, checkpoint: Path, layout: Mapping[str, Any], *, weights_only: bool = False) -> None:
        self.directory = checkpoint / SUBDIRECTORY
        self.stage, self.ranks = layout["zero_stage"], layout["world_size"]
        self._opened: dict[str, dict[str, Any]] = {}
        # Of each tensor of the optimizer: number of its state, and where it begins in the flat group (in a
        # rank's part of it at stage 3).
        self._places: dict[str, tuple[int, int]] = {}
        with _holding(checkpoint):
            self._find_entries(layout, weights_only)

    @staticmethod
    def weight_files(layout: Mapping[str, Any], files: Iterable[str]) -> list[str]:
        # From stage 3 on the weights lie with what the optimizer keeps.
        return [name for name in files if layout["zero_stage"] == 3 or not name.endswith("_optim_states.pt")]

    def _find_entries(self, layout: Mapping[str, Any], weights_only: bool) -> None:
        module = self._model_file(0)["module"]
        self.entries = {
            f"{MODEL}{name}": Entry(tuple(shape), module[name].dtype) for name, shape in layout["shapes"].items()
        }
        if weights_only and self.stage < 3:
            return
        for number, names in enumerate(self._groups(layout)):
            offset = 0
            for name, padding in names.items():
                whole = self.entries[f"{MODEL}{name}"]
                self._places[name] = number, offset
                offset += (whole.numel if self.stage < 3 else -(-whole.numel // self.ranks)) + padding
                for entry, value in self._optimizer_state(0).get(number, {}).items():
                    shape = () if _is_number(value) else tuple(value.shape) if self.stage == 0 else whole.shape
                    self.entries[f"{OPTIMIZER}{name}.{entry}"] = Entry(shape, torch.as_tensor(value).dtype)

    def _groups(self, layout: Mapping[str, Any]) -> list[dict[str, int]]:
        """Returns, for each state that the optimizer keeps, its tensors in order and the padding behind each."""
        if self.stage == 0:
            return [{name: 0} for name in layout["optimizer"]]
        shapes = self._model_file(0)["param_shapes"]
        paddings = self._optimizer_file(0).get("param_alignment_paddings") or [[0] * len(names) for names in shapes]
        return [dict(zip(names, padding, strict=True)) for names, padding in zip(shapes, paddings, strict=True)]

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        with _holding(self.directory.parent):
            tensor = self._read(key, start, stop)
            wanted = (self.entries[key].numel if stop is None else stop) - start
            if tensor.numel() != wanted:
                raise ValueError(f"{key} has {tensor.numel()} elements there, not {wanted}")
            return tensor

    def _read(self, key: str, start: int, stop: int | None) -> torch.Tensor:
        stop = self.entries[key].numel if stop is None else stop
        if key.startswith(MODEL):
            name, entry = key.removeprefix(MODEL), None
            if self.stage < 3 or name not in self._places:
                return self._of_module(name)[start:stop].clone()
        else:
            name, entry = key.removeprefix(OPTIMIZER).rsplit(".", 1)
            number, _ = self._places[name]
            value = self._optimizer_state(0)[number][entry]
            if self.stage == 0 or _is_number(value):
                return torch.as_tensor(value).flatten()[start:stop].clone()
        pieces = [self._flat(rank, name, entry)[a:b] for rank, a, b in self._spans(name, entry, start, stop)]
        return torch.cat(pieces) if pieces else torch.empty(0)

    def _spans(self, name: str, entry: str | None, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (rank, begin, end): where elements [start, stop) of a tensor lie in the ranks' parts of its group."""
        _, offset = self._places[name]
        if self.stage == 3:
            part = -(-self.entries[f"{MODEL}{name}"].numel // self.ranks)
            shift = offset
        else:
            part = self._flat(0, name, entry).numel()
            start, stop, shift = start + offset, stop + offset, 0
        while start < stop:
            rank, begin = divmod(start, part)
            end = min(part, begin + stop - start)
            yield rank, shift + begin, shift + end
            start += end - begin

    def _flat(self, rank: int, name: str, entry: str | None) -> torch.Tensor:
        """Returns a rank's part of the flat group that a tensor is in; entry None: of the weights (stage 3)."""
        number, _ = self._places[name]
        if entry is None:
            return self._optimizer_file(rank)["fp32_flat_groups"][number].detach()
        return self._optimizer_state(rank)[number][entry]

    def _of_module(self, name: str) -> torch.Tensor:
        """Returns a tensor, flattened, that the model's file holds in full, or that is frozen and cut at stage 3."""
        held = self._model_file(0)
        if name not in (held["frozen_param_fragments"] or ()):
            return held["module"][name].detach().flatten()
        parts = [self._model_file(rank)["frozen_param_fragments"][name].flatten() for rank in range(self.ranks)]
        return torch.cat(parts)[: self.entries[f"{MODEL}{name}"].numel]

    def _model_file(self, rank: int) -> dict[str, Any]:
        return self._open(f"zero_pp_rank_{rank}_" * (self.stage == 3) + "mp_rank_00_model_states.pt")

    def _optimizer_file(self, rank: int) -> dict[str, Any]:
        return self._open(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]

    def _optimizer_state(self, rank: int) -> dict[int, dict[str, Any]]:
        if self.stage == 0:
            return self._model_file(rank)["optimizer"]["state"]
        held = self._optimizer_file(rank)
        return held["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]["state"]

    def _open(self, name: str) -> dict[str, Any]:
        if name not in self._opened:
            self._opened[name] = load_file(self.directory / name)
        return self._opened[name]


def _is_number(value: Any) -> bool:
    """Returns whether an entry of the optimizer's state is one number, and not flat pieces of parameters."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0
