"""One test of many cheap cases, which reports all that fail and not only the first."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch


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
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.messages.append(f"{case}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})")

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            assert self.cases > 0, "no case was tried"
            assert not self.messages, f"{len(self.messages)} of {self.cases} cases:\n" + "\n".join(self.messages)


def each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes one test of all values: for cases of milliseconds, where `pytest.mark.parametrize` makes a test of each.

    names, values: as parametrize takes them. Every case starts from the seed of the test, with a `tmp_path` and a
    `monkeypatch` of its own; what other fixtures hold is shared by the cases.
    """
    parameters = [name.strip() for name in names.split(",")]
    cases = list(values)
    assert not any(hasattr(case, "marks") for case in cases), "a case with marks needs a test of its own"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            seed = torch.initial_seed()
            with Failures() as failures:
                for number, case in enumerate(cases):
                    given = dict(zip(parameters, case if len(parameters) > 1 else [case], strict=True))
                    torch.manual_seed(seed)
                    with failures.of(", ".join(map(str, given.values()))[:200]), contextlib.ExitStack() as stack:
                        test(**given, **{name: own(name, value, number, stack) for name, value in fixtures.items()})

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in parameters]
        run.__signature__ = signature.replace(parameters=kept)
        del run.__wrapped__
        return run

    def own(name: str, value: Any, number: int, stack: contextlib.ExitStack) -> Any:
        if name == "tmp_path":
            folder = value / f"case-{number}"
            folder.mkdir()
            return folder
        return stack.enter_context(value.context()) if name == "monkeypatch" else value

    return decorate
