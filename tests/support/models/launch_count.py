"""Counts what a layer starts on a GPU: launches of Triton kernels, and PyTorch's own operations."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from matmix.kernels.launching import record_launches

_PRODUCTS = {"mm", "addmm", "bmm"}
_NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "_unsafe_view",
    "lift_fresh",
    "promote_types",
}


class Counted(TorchDispatchMode):
    """While active, counts PyTorch's operations that are neither views, nor allocations, nor this project's own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if function.namespace == "aten" and not function.is_view and name not in _NOTHING:
            self.names[name] += 1
        return function(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.names[name] for name in _PRODUCTS)

    @property
    def others(self) -> Counter[str]:
        return Counter({name: count for name, count in self.names.items() if name not in _PRODUCTS})


@contextlib.contextmanager
def counted(monkeypatch, inside: Iterable[tuple[str, str]]) -> Iterator[tuple[list, Counted]]:
    """The launches, which are not run, and the other operations of this block. inside: (module, function) of the
    functions that registered ops call, whose own operations would not be seen from outside."""
    counter = Counted()

    def seen(function):
        def call(*args, **kwargs):
            with counter:
                result = function(*args, **kwargs)
            # Tensors that are noted here would count as in use, and gradients be copied for that reason.
            launches[:] = [launch._replace(arguments=()) for launch in launches]
            return result

        return call

    with monkeypatch.context() as patch, record_launches() as launches:
        for module, name in inside:
            found = importlib.import_module(module)
            patch.setattr(found, name, seen(getattr(found, name)))
        with counter:
            yield launches, counter
