"""The cores of this machine, and processes that end with the one that started them, however it ended."""

import ctypes
import multiprocessing
import os
import sys

_PR_SET_PDEATHSIG = 1


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_each(processes: int) -> int:
    """Returns the threads that each of so many processes may start, so that they share the cores."""
    return max(1, cores() // max(1, processes))


def end_with(parent: int, number: int) -> bool:
    """Asks the kernel to send signal `number` to this process when `parent` dies; returns whether it still lives now.
    The kernel watches the thread that started this process, and says nothing of a parent that died before it was asked:
    the caller passes the number that it knows from before. Elsewhere than on Linux only that comparison is made."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return os.getppid() == parent


def follow_parent() -> None:
    """Waits until the process that has started this one by multiprocessing is gone, and ends this one. For a thread.
    `end_with` is the surer: of forked siblings each keeps the pipe open by which the ones before it would notice."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
