"""Which storages a computation allocates and which outlive it: what activations cost, counted tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class Allocation:
    """A storage and the op that returned it."""

    storage: StorageWeakRef
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    @property
    def alive(self) -> bool:
        return not self.storage.expired()


class Storages(TorchDispatchMode):
    """While active, lists in `allocations` every storage that an op returns for the first time.

    What an op allocates and frees inside itself is its own affair; this project's fused ops count as one each.
    In contrast to hooks on saved tensors it sees what checkpoints keep, and it works on fake tensors too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._is_new(tensor)
        result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if self._is_new(tensor):
                storage = tensor.untyped_storage()
                reference = self._known[storage._cdata]
                shape = tuple(tensor.shape)
                self.allocations.append(Allocation(reference, str(function), shape, tensor.dtype, storage.nbytes()))
        return result

    def _is_new(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        # The weak reference keeps the address from being used again as long as it is held here.
        if known is not None:
            return False
        self._known[storage._cdata] = StorageWeakRef(storage)
        return storage.nbytes() > 0

    def live_bytes(self) -> int:
        """Bytes of the listed storages that still exist."""
        return sum(allocation.bytes for allocation in self.allocations if allocation.alive)
