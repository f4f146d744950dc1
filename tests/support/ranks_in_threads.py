"""The ranks of a context as threads of this process, of which one runs at a time: for Triton's interpreter, which is of
one process and slow to start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from matmix.kernels.context import Context


class RanksInThreads:
    """Calls functions on all ranks; modules that gather find their `Gathering` replaced."""

    def __init__(self, monkeypatch, size: int, *modules: Any) -> None:
        self.size, self.turn, self.here = size, threading.Lock(), threading.local()
        self.meeting = threading.Barrier(size)
        self.sent: list[tuple[Tensor, ...]] = [()] * size
        monkeypatch.setattr(Context, "named", classmethod(lambda cls, name: self.here.context if name else None))
        for module in modules:
            monkeypatch.setattr(module, "Gathering", self.gathering)

    def gathering(self, context: Context, *tensors: Tensor) -> Any:
        self.sent[context.rank] = tuple(x.to(tensors[0].dtype) for x in tensors)
        return self

    def wait(self) -> list[Tensor]:
        self.meet()
        received = [
            torch.stack([x.reshape(x.shape or (1,)) for x in of_all]) for of_all in zip(*self.sent, strict=True)
        ]
        self.meet()  # before anybody sends again
        return received

    def meet(self) -> None:
        self.turn.release()
        try:
            self.meeting.wait(60)
        finally:
            self.turn.acquire()

    def run(self, function: Callable, *arguments: Any) -> list[Any]:
        """What function(context, *arguments) returned on each rank."""
        returned, failures = [None] * self.size, []

        def run(rank: int) -> None:
            self.here.context = Context("threads", rank, self.size)
            with self.turn:
                try:
                    returned[rank] = function(self.here.context, *arguments)
                except BaseException as error:
                    failures.append(error)
                    self.meeting.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
        if failures:
            raise (real or failures)[0]
        return returned
