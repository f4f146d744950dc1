"""The state of one rank, model and optimizer, as it was at one step, for a save that writes it later."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from matmix.train.optim.base import is_sharded, local_part

State = TypeVar("State")


class Snapshot(abc.ABC):
    """This rank's part of a checkpoint. It keeps its tensors alive: drop it when it is written."""

    @abc.abstractmethod
    def write(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        """Writes it below `directory` and to the disk, on all ranks together; in any thread, if `group` is its
        own.

        group: what the ranks agree over, as for `distributed.gather_objects`. Raises OSError where the storage
        failed, on that rank at least.
        """


class HostMemory:
    """Copies of nested states in host memory, which is kept: the next copy of a state overwrites the last one.

    Fresh memory would have to be mapped by the kernel page by page, and pinned where tensors come from a GPU;
    both cost more than the copy itself. (Pinned tensors take up to twice their size: torch rounds up to powers
    of two.)
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        """Gives the memory back."""
        self._buffers.clear()

    @torch.no_grad()
    def copy(self, state: State, name: str = "") -> State:
        """A copy of `state` that nothing changes until the next one of this `name`.

        state: dicts, lists and tuples in each other, with tensors and DTensors in them and anything else that
        can be copied. The tensors of the copy are on the CPU.
        """
        copies: dict[int, Any] = {}  # by id of the original, which `state` keeps alive
        seen: dict[tuple[Any, ...], torch.Tensor] = {}  # tied weights stay tied
        devices: set[torch.device] = set()
        for place, tensor in _tensors_of(state, (name,)):
            local = local_part(tensor)
            view = (local.data_ptr(), local.shape, local.stride(), local.dtype)
            if local.numel() == 0 or view not in seen:
                seen[view] = self._buffer(place, local).copy_(local, non_blocking=True)
            host = seen[view]
            copies[id(tensor)] = _sharded_like(tensor, host) if is_sharded(tensor) else host
            devices.add(local.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copy.deepcopy(state, copies)

    def _buffer(self, place: tuple[Any, ...], like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
            self._buffers[place] = buffer
        return buffer


def _sharded_like(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """A DTensor that is laid out as `tensor` is, of which `host` is this rank's part."""
    return type(tensor)(host, tensor._spec, requires_grad=False)


def _tensors_of(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor inside `value`, with the keys and indices that lead to it."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_of(item, (*place, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_of(item, (*place, index))


def find_os_error(error: BaseException | None) -> OSError | None:
    """The OSError that `error` is, was caused by, or hides (torch's writer reports a failed write as
    RuntimeError)."""
    seen = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError) and ("file write failed" in str(error) or "unexpected pos" in str(error)):
        return OSError(None, "the file could not be written whole")
    return None
