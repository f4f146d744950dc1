"""Real processes for tests: `run_distributed(function, world_size)` calls `function(*arguments)` on every rank.

Processes live on from one call to the next, in a group for each number of ranks that was asked for: what they import
and what meeting the others costs is paid once. A group ends with a failure, after some calls, and with the tests.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

CALLS = 20
"""After so many a group is made anew: process groups that runs make inside of it stay for as long as it lives."""
PATIENCE = 240.0
"""Seconds that a collective waits for the other ranks."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *,
    arguments: tuple[Any, ...] = (),
    timeout: float = 300,
    alone: bool = False,
    interpreted: bool = False,
) -> list[Any]:
    """Returns what `function` returned on each rank, in order. Fails with the children's tracebacks, or after
    `timeout` seconds.

    function: a function at the top level of a module; each process imports that module from its file, so it should
    import little. It runs with the process group made and torchrun's variables set; what it changes in the environment
    is put back. alone: in processes of their own, which may start others, such as readers, and which end with the call:
    for functions that leave behind what another run would meet. interpreted: in processes of their own, in which Triton
    is imported for its interpreter; the function calls `triton_on_cpu.interpret`.
    """
    module = sys.modules[function.__module__]
    name = (str(Path(module.__file__).resolve().parent), Path(module.__file__).stem, function.__name__)
    group = None if alone or interpreted else _groups.pop(world_size, None)
    group = group or _Group(world_size, daemon=not alone, interpreted=interpreted)
    try:
        returned = group.call(name, arguments, timeout)
    except BaseException:
        group.end(kill=True)
        raise
    if alone or interpreted or group.calls >= CALLS:
        group.end()
    else:
        _groups[world_size] = group
    return returned


class _Group:
    """Ranks that wait for functions to run."""

    def __init__(self, world_size: int, daemon: bool, interpreted: bool = False) -> None:
        """daemon: the processes end with the tests whatever happens, but may not have children. interpreted: see
        `run_distributed`."""
        # What processes are forked from has imported Triton for a compiler.
        context = multiprocessing.get_context("spawn" if interpreted else "forkserver")
        # Processes are forked from one that has imported all this already: imports are most of what a process costs.
        context.set_forkserver_preload(
            [
                *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor"),
                *("torch._dynamo", "matmix.train.command", "matmix.train.loop", "streaming", "transformers"),
                "deepspeed.runtime.zero.muon.muon_optimizer",  # imports the compiler, when an engine is made
            ]
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.calls = 0
        self.ranks: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, world_size, port), daemon=daemon)
            with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if interpreted else {}):
                process.start()
            there.close()
            self.ranks.append(here)
            self.processes.append(process)

    def call(self, name: tuple[str, str, str], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        self.calls += 1
        for rank in self.ranks:
            rank.send((sys.path, name, arguments))
        returned: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while len(returned) < len(self.ranks):
            waiting = [rank for number, rank in enumerate(self.ranks) if number not in returned]
            for ready in wait(waiting, timeout=max(deadline - time.monotonic(), 0)) or [None]:
                if ready is None:
                    failures.append(f"ranks {sorted(set(range(len(self.ranks))) - set(returned))} did not finish")
                    break
                number = self.ranks.index(ready)
                try:
                    value, failure = ready.recv()
                except (EOFError, OSError):
                    self.processes[number].join()
                    code = self.processes[number].exitcode
                    value, failure = None, f"the process died with exit code {code} and without a traceback"
                returned[number] = value
                if failure:
                    failures.append(f"rank {number}:\n{failure}")
                    # The others are waiting for this rank: give them a moment to fail on their own, then stop.
                    deadline = min(deadline, time.monotonic() + 3)
            if failures and time.monotonic() >= deadline:
                break
        assert not failures, "\n".join(failures)
        return [returned[number] for number in range(len(self.ranks))]

    def end(self, *, kill: bool = False) -> None:
        for rank, process in zip(self.ranks, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                rank.send(None)
            rank.close()
        for process in self.processes:
            process.join()


_groups: dict[int, _Group] = {}


@atexit.register
def _end_all() -> None:
    for group in _groups.values():
        group.end(kill=True)
    _groups.clear()


def _serve(calls: Connection, rank: int, world_size: int, port: int) -> None:
    """One rank: runs a function after the other, until one fails or the tests ask for no more."""
    gc.freeze()  # what was imported before the fork stays; looking through it would also copy its memory
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(place) for name, place in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.fsync = os.fstat  # as in the tests' own process
    environment, folder = dict(os.environ), Path.cwd()
    failure = None
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    except Exception:
        failure = traceback.format_exc()
    while True:
        try:
            message = calls.recv()
        except EOFError:
            break
        if message is None:
            break
        value = None
        try:
            if failure is None:
                value = _call(*message)
                dist.barrier()
        except BaseException:
            failure = traceback.format_exc()
        calls.send((value, failure))
        if failure:
            break
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
    calls.close()
    if dist.is_initialized() and not failure:
        dist.destroy_process_group()


def _call(path: list[str], name: tuple[str, str, str], arguments: tuple[Any, ...]) -> Any:
    import importlib

    import numpy as np
    import torch

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    directory, module, attribute = name
    sys.path[:] = [directory, *path]
    return getattr(importlib.import_module(module), attribute)(*arguments)
