"""The processes that read data. They ignore the signals of terminals and schedulers, and end with the training process.

Such signals reach every process of a job, and what to do then is the training process's to decide: it may want to
finish its step, for which it needs its data. So its reading processes ignore them from their first instruction on (they
are blocked while a process is started). torch and multiprocessing end them by SIGTERM; here that becomes a signal that
nobody sends.
"""

import contextlib
import copy
import functools
import gc
import multiprocessing
import multiprocessing.context as contexts
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import queues, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from matmix.data.artifacts import one_line
from matmix.data.processes import end_with, follow_parent

_IGNORED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
_END = signal.SIGURG


def reading_context(start: str) -> contexts.BaseContext:
    """Returns the context for a DataLoader. start: fork, spawn or forkserver."""
    if start != "fork":
        with _signals_blocked():  # the helper of these contexts, which queues would start, must outlive them as well
            resource_tracker.ensure_running()
    context = copy.copy(multiprocessing.get_context(start))
    context.Process = _PROCESSES[start]
    return context


def worker_beginning(start: str) -> Callable[[int], None]:
    """Returns the `worker_init_fn` of a DataLoader whose workers are started now, by this thread."""
    # The kernel watches the thread that starts a process, not its process, so it is asked where that thread stays.
    # A fork server is no parent to follow: it lives for as long as the processes that it started.
    lasting = start != "forkserver" and threading.current_thread() is threading.main_thread()
    return functools.partial(_begin, parent=os.getpid() if lasting else None)


def _begin(_worker: int, parent: int | None) -> None:
    # A forked process inherits the parent's garbage; collecting it there would run finalisers (those of other
    # loaders end their workers) that only the parent may run.
    gc.freeze()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(_END, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_IGNORED, _END})
    if parent is not None and not end_with(parent, signal.SIGKILL):
        os._exit(1)
    threading.Thread(target=follow_parent, daemon=True).start()
    queues.Queue._on_queue_feeder_error = staticmethod(_cannot_send)


def _cannot_send(error: Exception, _batch: object) -> None:
    """Ends the process, as a full /dev/shm: multiprocessing would drop the batch, and training wait for it for ever."""
    os.write(2, f"matmix: a reading process could not hand on its batch: {one_line(error)}\n".encode())
    os._exit(1)


def _start(popen: Callable[[BaseProcess], Any], process: BaseProcess) -> Any:
    """Starts a process as `popen` does, with the signals blocked in it until it knows what to do with them."""
    with _signals_blocked():
        started = popen(process)
    reference = weakref.ref(started)

    def end() -> None:
        if (running := reference()) is not None:
            running._send_signal(_END)

    started.terminate = end
    return started


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_IGNORED, _END})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _ForkProcess(contexts.ForkProcess):
    _Popen = staticmethod(functools.partial(_start, contexts.ForkProcess._Popen))


class _SpawnProcess(contexts.SpawnProcess):
    _Popen = staticmethod(functools.partial(_start, contexts.SpawnProcess._Popen))


class _ForkServerProcess(contexts.ForkServerProcess):
    _Popen = staticmethod(functools.partial(_start, contexts.ForkServerProcess._Popen))


_PROCESSES = {"fork": _ForkProcess, "spawn": _SpawnProcess, "forkserver": _ForkServerProcess}
