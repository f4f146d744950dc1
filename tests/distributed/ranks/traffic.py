"""Records what this rank sends others while it trains: every collective of torch.distributed, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sent(NamedTuple):
    """One collective."""

    kind: str
    bytes: float
    """That this rank sends, as ring algorithms do."""
    dtype: torch.dtype | None


def _ring(kind: str, largest: int, ranks: int) -> float:
    return largest * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "all_gather": "all_gather",
}
_OPS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}


class Traffic(TorchDispatchMode):
    """While active: `sent` of this rank. Calls are seen by their names in torch.distributed, also inside of operations,
    and those of libraries that took the functions before by what they dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self._seen = False

    def bytes(self, kind: str, *dtypes: torch.dtype) -> float:
        """Sent by one kind of collective, of these types; none = of all."""
        return sum(one.bytes for one in self.sent if one.kind == kind and (not dtypes or one.dtype in dtypes))

    def note(self, kind: str) -> None:
        """Adds something that is no collective to the record."""
        self.sent.append(Sent(kind, 0, None))

    def _add(self, kind: str, tensors: list[torch.Tensor], ranks: int) -> None:
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        # Not what the loop counts and compares besides: losses, norms, whether copies agree.
        if largest.numel() > 2:
            self.sent.append(Sent(kind, _ring(kind, largest.nbytes, ranks), largest.dtype))

    def __enter__(self) -> Traffic:
        self._originals = {name: getattr(dist, name) for name in (*_NAMES, "batch_isend_irecv")}
        for name, kind in _NAMES.items():
            setattr(dist, name, self._recording(self._originals[name], kind))
        dist.batch_isend_irecv = self._between_neighbours
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)
        super().__exit__(*exception)

    def _recording(self, function: Any, kind: str) -> Any:
        def recording(*arguments: Any, group: Any = None, **options: Any) -> Any:
            tensors = [one for one in tree_leaves((arguments, options)) if isinstance(one, torch.Tensor)]
            self._add(kind, tensors, dist.get_world_size(group))
            with self._once():
                return function(*arguments, group=group, **options)

        return recording

    def _between_neighbours(self, operations: list[dist.P2POp]) -> Any:
        for one in operations:
            if one.op is dist.isend:
                self.sent.append(Sent("neighbours", one.tensor.nbytes, one.tensor.dtype))
        return self._originals["batch_isend_irecv"](operations)

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        self._seen = True
        try:
            yield
        finally:
            self._seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and name in _OPS and not self._seen:
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            self._add(_OPS[name], tensors, dist.get_world_size())
        return function(*args, **(kwargs or {}))
