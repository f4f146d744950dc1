"""Works on chunks of the input in several processes, and gives the results in the order of the chunks."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from matmix.data.artifacts import panics_as_errors
from matmix.data.processes import follow_parent

_Chunk = TypeVar("_Chunk")
_Result = TypeVar("_Result")


def work_in_order(
    chunks: Iterable[_Chunk], processes: int, work: Callable[[_Chunk], _Result], *, doing: str
) -> Iterator[tuple[_Chunk, _Result]]:
    """Yields each chunk with its result, in order and with few chunks in flight. work: goes to each process once,
    pickled. Raises what reading and working raise, RuntimeError when a process was killed."""
    if processes == 1:
        yield from ((chunk, work(chunk)) for chunk in chunks)
        return
    # Forking a process that runs threads (torch, tqdm, the tokenizers library) may lock up; spawning does not.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(work,))
    waiting: deque[tuple[_Chunk, Future[_Result]]] = deque()
    try:
        for chunk in chunks:
            with without_interrupts():  # the first one starts the processes
                waiting.append((chunk, pool.submit(_work_on, chunk)))
            if len(waiting) > 2 * processes + 1:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a {doing} process was killed (out of memory?); run the same command again to continue, "
            "perhaps with fewer processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Puts interrupts off: processes that start here get none before they have learned to ignore them."""
    noted: list[int] = []
    handles = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number)) if handles else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit that
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handles:
            signal.signal(signal.SIGINT, handler)
    if noted:
        signal.raise_signal(signal.SIGINT)


_work: Callable[[Any], Any] | None = None


def start_process() -> None:
    """Lets this process ignore Ctrl-C, which its whole group gets, and end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=follow_parent, daemon=True).start()


def _start(work: Callable[[Any], Any]) -> None:
    global _work
    start_process()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work = work


def _work_on(chunk: Any) -> Any:
    assert _work is not None
    with panics_as_errors():
        return _work(chunk)
