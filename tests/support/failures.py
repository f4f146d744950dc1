"""One test of many cases reports all that fail, not only the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


class Failures:
    """Collects the failures of the cases of one test:

        with Failures() as failures:
            for name in names:
                with failures.of(name):
                    assert is_right(name)

    The test fails at the end of the outer block, and names each case with its failure.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.cases = 0

    def __enter__(self) -> Failures:
        return self

    @contextlib.contextmanager
    def of(self, case: str) -> Iterator[None]:
        """Runs the block; an exception in it, an exit included, is a failure of `case`."""
        self.cases += 1
        try:
            yield
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            self.messages.append(f"{case}: {type(error).__name__}: {error}")

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            assert self.cases > 0, "no case was tried"
            assert not self.messages, f"{len(self.messages)} of {self.cases} cases:\n" + "\n".join(self.messages)
