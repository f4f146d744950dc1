"""Starts processes cheaply: imports what training needs once, then forks a process for each line of JSON on its input.

A request is {"arguments": [...], "environment": {...}, "output": path}; the answer is {"pid": n}, and {"pid": n,
"code": n} when that process has ended (a negative code is the signal that killed it). What runs in the process is
`worker.main(arguments)`, as `python worker.py` would run it; the imports are most of what a small run costs.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
from typing import Any

import worker

PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo"),
    *(
        "matmix.train.entry",
        "matmix.train.command",
        "matmix.train.loop",
        "matmix.train.engine.fsdp",
        "streaming",
        "transformers",
    ),
)


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def begin_child(request: dict[str, Any]) -> None:
    """A session of its own, its output in a file, nothing of the parent's."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(stream, number)
    os.closerange(3, 64)
    os.environ.update(request["environment"])


def report_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        answer(pid=pid, code=os.waitstatus_to_exitcode(status))


def serve() -> dict[str, Any] | None:
    """Forks for each request. Returns the request in the child, None in the parent when its input has ended."""
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = b""
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
        if 0 in ready:
            received = os.read(0, 1 << 16)
            if not received:
                return None
            *lines, waiting = (waiting + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    begin_child(request)
                    return request
                answer(pid=pid)
        report_ended()


if __name__ == "__main__":
    for module in PRELOADED:
        __import__(module)
    gc.freeze()  # what was imported stays; looking through it in a forked process would also copy its memory
    mine = serve()
    if mine is not None:
        sys.exit(worker.main(mine["arguments"]))
