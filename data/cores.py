"""Counts the cores that there are to work on."""

from __future__ import annotations

import os


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_each(processes: int) -> int:
    """Returns the threads of each of so many processes, so that they share the cores; each would otherwise start one
    for every core."""
    return max(1, cores() // max(1, processes))
