"""What is said to people, for tests."""

from __future__ import annotations

import logging
from collections.abc import Callable


class Heard(logging.Handler, list):
    """A list of what the package says from now on, in the words of the console, until `close`."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        """then: called after each message."""
        logging.Handler.__init__(self)
        self.then = then
        logger = logging.getLogger("matmix")
        self.level_before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    __hash__ = object.__hash__

    def emit(self, record: logging.LogRecord) -> None:
        self.append(f"{'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}")
        self.then()

    def close(self) -> None:
        logger = logging.getLogger("matmix")
        logger.removeHandler(self)
        logger.setLevel(self.level_before)
        super().close()
