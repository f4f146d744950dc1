"""What the C library does with freed memory."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_CONTROLS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed, for the next step: else it gives large tensors of each step on a CPU back to the
    system, which has to clear every page of the next ones. The process stays as large as it was at its largest.

    Returns whether it does: not under another C library, nor where an environment variable of glibc says otherwise.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _CONTROLS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_THRESHOLD, 2**30))
