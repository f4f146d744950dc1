"""An error that several ranks have is said by one of them.

Ranks that fail do not wait for one another, and the store that they met in may be gone with rank 0. So the one that
first makes a file, named by the error, in a folder that they share, speaks; nothing but the file system is asked. What
launchers give: torch's agent a folder of reports for each node and attempt, ours on one host the folder of the store,
and a scheduler's ranks that of their logs.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from matmix.train.process import stop
from matmix.train.process.launched import STORE_VARIABLE

_LOOK_SECONDS = 0.05
_handle = -1


def share(folder: Path) -> None:
    """The ranks of this start share this folder, which is made; it is held, also where it is moved while they run.
    Raises OSError."""
    global _handle
    folder.mkdir(parents=True, exist_ok=True)
    _handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def is_first(what: str, seconds: float) -> bool | None:
    """Returns True where this rank is the one to say `what`: no other rank has said it, nor does within `seconds`, nor
    before this process is asked to stop. None where ranks share no folder, and nobody can tell."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    report, store = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get(STORE_VARIABLE)
    if report:
        path, folder = str(Path(report).parents[1] / f"said-{name}"), None
    elif store:
        path, folder = f"{store}-said-{name}", None
    elif _handle >= 0:
        path, folder = f"said-{name}", _handle
    else:
        return None
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not stop.received() and not _exists(path, folder):
            time.sleep(_LOOK_SECONDS)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
    except FileExistsError:
        return False
    except OSError:
        return None
    return True


def _exists(path: str, folder: int | None) -> bool:
    try:
        os.stat(path, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True
