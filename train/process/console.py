"""How processes begin and how commands end: the user's mistakes are one line and exit code 2, never a traceback."""

import atexit
import contextlib
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from matmix.data.artifacts import panics_as_errors
from matmix.train.errors import PeerError, RunFailure
from matmix.train.process import node_folders, stop
from matmix.train.process.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER
from matmix.train.process.launched import STORE_VARIABLE, follow_launcher
from matmix.train.process.logs import LEVEL_VARIABLE, shown

USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)

_TRACEBACK = "MATMIX_TRACEBACK"
_MOMENT = 1.0
"""Seconds that a rank waits for others which may say the same, or the reason."""

job_output: TextIO | None = None
"""Where errors are shown as well, when a rank's own output goes to a file."""


def begin_process() -> None:
    """Prepares a process before it imports torch. It ends with its launcher, if it has one.

    `python -m` and `torchrun -m` put the working directory on sys.path; from the root of a checkout our folders `data`
    and `kernels` would then answer imports that other packages make for themselves, so the root is taken off again.
    Idle OpenMP threads are told to sleep: spinning, they made training on 2 cores up to 7 times slower as soon as
    another process wanted one of them. Imports make a million objects that stay: garbage is looked for after every
    hundred thousand, not seven hundred, and none of it at the end; a start of training takes a third less time.
    """
    follow_launcher()
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not os.environ.get(_TRACEBACK):
        os.environ["RUST_BACKTRACE"] = "0"
    root = Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]


def begin_training(prepare: Callable[[], object] = lambda: None) -> int:
    """Prepares a process that is going to train: signals, caches, temporary files. Returns an exit code, 0 = go on.
    prepare: what the caller adds before the folders are chosen."""
    stop.listen()
    begin_process()

    def begin() -> int:
        prepare()
        node_folders.use_caches()
        node_folders.use_own_folder()
        return EXIT_OK

    return guarded(begin)


def one_line(error: BaseException) -> str:
    """Returns the text of an error on one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename2 or error.filename}"  # of a copy, the target is the second
    return " ".join(str(error).split()) or type(error).__name__


def report(error: BaseException, *, every_rank: bool = False) -> None:
    """Prints an error as one line. every_rank: those that only another rank than 0 has are printed with its number, and
    what several ranks have once, as far as they can tell; else rank 0 alone speaks.

    A mistake of the user is found by all ranks: rank 0 is given a moment to say it. That another rank is gone follows
    from that one's error, which comes first.
    """
    rank, follows = int(os.environ.get("RANK", "0")), isinstance(error, PeerError)
    if rank and not every_rank:
        return
    text = one_line(error)
    line = f"matmix: error: {f'[rank {rank}] ' if rank else ''}{text}"
    if job_output is not None:
        print(line, file=sys.stderr, flush=True)
    patience = _MOMENT * (follows + bool(rank and (follows or isinstance(error, USER_ERRORS))))
    if not every_rank or _is_first(type(error).__name__ if follows else text, patience):
        print(line, file=job_output or sys.stderr, flush=True)


def exit_code(error: BaseException) -> int:
    """Returns the code that a process ends with after `error`: 2 for the user's mistakes, 130 for Ctrl-C, else 1."""
    if isinstance(error, USER_ERRORS):
        return EXIT_USER
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED


def is_expected(error: BaseException) -> bool:
    """Returns True where one line says all about `error`; anything else is a mistake of ours and needs its
    traceback."""
    return isinstance(error, (*USER_ERRORS, RunFailure, OverflowError, OSError, KeyboardInterrupt))


def guarded(command: Callable[[], int], *, every_rank: bool = False) -> int:
    """Runs a command and returns its exit code: its own, or that of the error it raised, which is shown in one line, or
    with MATMIX_TRACEBACK=1 let through. MATMIX_LOG_LEVEL says which messages are shown."""
    try:
        level = os.environ.get(LEVEL_VARIABLE, "info")
        with shown(level, rank=int(os.environ.get("RANK", "0"))), panics_as_errors():
            return command()
    except BaseException as error:
        if os.environ.get(_TRACEBACK) or not is_expected(error):
            raise
        if isinstance(error, BrokenPipeError):
            sys.stdout = None  # the reader (head, less) has left; nothing more is to be flushed at exit
            return EXIT_OK
        if isinstance(error, KeyboardInterrupt):
            print("matmix: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints it in the last of its many lines
            words = {"message": one_line(error), "extraInfo": {"timestamp": str(int(time.time()))}}
            with contextlib.suppress(OSError):  # the error itself is told without it
                Path(path).write_text(json.dumps({"message": words}), encoding="utf-8")
        report(error, every_rank=every_rank)
        return exit_code(error)


# -- an error that several ranks have is said by one of them ---------------------------------------------------------


_handle: int | None = None


def share(folder: Path) -> None:
    """Makes the folder that the ranks of this start share; it is held, also where it is moved. Raises OSError."""
    global _handle
    folder.mkdir(parents=True, exist_ok=True)
    _handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_first(what: str, seconds: float) -> bool:
    """Returns True where no other rank has said `what`, nor does within `seconds` or before this process is asked to
    stop; also where nobody can tell."""
    path, folder = f"said-{hashlib.sha256(what.encode()).hexdigest()[:16]}", None
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        path = str(Path(report).parents[1] / path)
    elif store := os.environ.get(STORE_VARIABLE):
        path = f"{store}-{path}"
    elif (folder := _handle) is None:
        return True
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not stop.received():
            with contextlib.suppress(FileNotFoundError):
                os.stat(path, dir_fd=folder)
                return False
            time.sleep(0.05)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True
