"""Runs a command that ends with the process that started it: `python child.py PARENT COMMAND ...` (standard library).

On Linux the kernel is asked to send SIGTERM when the parent dies, however it dies (prctl, PR_SET_PDEATHSIG); that holds
over exec, so the command itself needs to know nothing of it. Elsewhere a parent that is killed leaves it running.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died before
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
