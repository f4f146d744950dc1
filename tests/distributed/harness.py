"""Real processes for tests: `run_distributed(function, world_size)` calls `function(*arguments)` on every
rank."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    backend: str = "gloo",
    *,
    arguments: tuple[Any, ...] = (),
    timeout: float = 300,
    with_children: bool = False,
) -> list[Any]:
    """What `function` returned on each rank, in order. Fails with the children's tracebacks, or after
    `timeout` seconds.

    function: a function at the top level of a module; each process imports that module anew, from its file,
    so it should import little. It runs with the process group made and torchrun's variables set. A collective
    that waits longer than half of `timeout` raises. with_children: the processes start others, such as readers.
    """
    context = multiprocessing.get_context("forkserver")
    # Processes are forked from one that has imported all this already: imports are most of what a process costs.
    context.set_forkserver_preload(
        [
            *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo"),
            *("matmix.train.command", "matmix.train.loop", "streaming", "transformers"),
            "deepspeed.runtime.zero.muon.muon_optimizer",  # imports the compiler, when an engine is made
        ]
    )
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = sys.modules[function.__module__]
    name = (str(Path(module.__file__).resolve().parent), Path(module.__file__).stem, function.__name__)
    processes = [
        context.Process(
            target=_run,
            args=(name, arguments, rank, world_size, backend, port, timeout / 2, results),
            daemon=not with_children,  # daemons end with the tests whatever happens, but may not have children
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    returned: dict[int, Any] = {}
    failures: list[str] = []
    deadline = time.monotonic() + timeout
    try:
        while len(returned) + len(failures) < world_size:
            try:
                rank, value, failure = results.get(timeout=0.5)
            except queue.Empty:
                dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                if dead:
                    failures.append(f"a process died with exit code {dead[0]} and without a traceback")
                    break
                if time.monotonic() > deadline:
                    missing = sorted(set(range(world_size)) - set(returned))
                    failures.append(f"ranks {missing} did not finish within {timeout} s")
                    break
                continue
            if failure:
                failures.append(f"rank {rank}:\n{failure}")
                # The others are waiting for this rank: give them a moment to fail on their own, then stop.
                deadline = min(deadline, time.monotonic() + 3)
            else:
                returned[rank] = value
    finally:
        for process in processes:
            if failures:
                process.kill()
            process.join()
    assert not failures, "\n".join(failures)
    return [returned[rank] for rank in range(world_size)]


def _run(
    name: tuple[str, str, str],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    backend: str,
    port: int,
    patience: float,
    results: Any,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    directory, module, attribute = name
    sys.path.insert(0, directory)
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=patience))
        function = getattr(importlib.import_module(module), attribute)
        value = function(*arguments)
        dist.barrier()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        if dist.is_initialized():
            dist.destroy_process_group()
