"""Sets up where messages of the logger "matmix" go. Rank 0 speaks for all; what others must say is EVERY_RANK."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

LEVEL_VARIABLE = "MATMIX_LOG_LEVEL"
"""The level of commands that read no recipe; a run has `logging.level`."""
LEVELS = ("debug", "info", "warning", "error")
EVERY_RANK = {"every_rank": True}
_OURS = logging.getLogger("matmix")


class _Console(logging.Handler):
    """Writes to what is stderr at the time, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        # Whatever fails here, such as a pipe that nobody reads any more, costs the words and not the run.
        with contextlib.suppress(Exception):
            kind = "" if record.levelno < logging.WARNING else "warning: "
            tqdm.write(f"{kind}{self.format(record)}\n", file=sys.stderr, end="")
            sys.stderr.flush()


class _File(logging.Handler):
    """Appends to a file. The first write that fails is told of on the console; then it goes on trying."""

    def __init__(self, path: Callable[[], Path]) -> None:
        super().__init__()
        self._path, self._told = path, False
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))

    def emit(self, record: logging.LogRecord) -> None:
        path = self._path()
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{self.format(record)}\n")
        except OSError as error:
            if not self._told:
                self._told = True
                _OURS.warning(f"{path} cannot be written ({error}); training goes on without")


@contextlib.contextmanager
def shown(level: str, *, rank: int = 0) -> Iterator[None]:
    """Shows messages of `level` and above on stderr; of two, the inner one counts. Raises ValueError for no level."""
    if level not in LEVELS:
        raise ValueError(f"the level of messages must be one of {', '.join(LEVELS)}, got {level!r}")
    console = _Console()
    console.addFilter(lambda record: rank == 0 or getattr(record, "every_rank", False))
    before = _OURS.handlers[:], _OURS.level, _OURS.propagate
    _OURS.handlers[:] = [*(handler for handler in before[0] if not isinstance(handler, _Console)), console]
    _OURS.setLevel(level.upper())
    _OURS.propagate = False  # libraries give the root logger a handler of its own: each message would come twice
    try:
        yield
    finally:
        _OURS.handlers[:], _OURS.propagate = before[0], before[2]
        _OURS.setLevel(before[1])


def open_file(path: Callable[[], Path]) -> logging.Handler:
    """Writes what is shown into a file as well, with time stamps, until `close_file`. path: where it is at the time."""
    handler = _File(path)
    _OURS.addHandler(handler)
    return handler


def close_file(handler: logging.Handler) -> None:
    _OURS.removeHandler(handler)
