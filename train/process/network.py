"""Waits until another host can be reached. (Standard library only, for launchers.)"""

from __future__ import annotations

import socket
import time


def wait_for_port(host: str, port: int, seconds: float) -> None:
    """Returns when somebody answers at this port.

    A plain socket tries: torch's clients log pages of C++ frames for each failed try. Raises socket.gaierror at once
    where the name does not resolve, TimeoutError (its text is the last reason) after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:  # a name server that is busy may yet answer
                raise
            reason = f"the name {host} does not resolve here ({error.strerror})"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(reason)
        time.sleep(0.2)
