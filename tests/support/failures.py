"""One test of many cheap cases, which reports all that fail and not only the first."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
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


def each(names: str, values: Iterable[Any], *, fresh: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes one test of all values: for cases of milliseconds, where `pytest.mark.parametrize` makes a test of each.

    names, values: as parametrize takes them. Every case starts from the seed of the test, with a `tmp_path` and a
    `monkeypatch` of its own. What other fixtures hold is shared by the cases, but for the one named `fresh`: a folder
    below `tmp_path`, of which each case gets a copy at the same place below its own.
    """
    parameters = [name.strip() for name in names.split(",")]
    cases = list(values)
    assert not any(hasattr(case, "marks") for case in cases), "a case with marks needs a test of its own"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        wanted = [name for name in signature.parameters if name not in parameters]

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            seed, folder = torch.initial_seed(), fixtures.get("tmp_path")
            with Failures() as failures:
                for number, case in enumerate(cases):
                    own = dict(zip(parameters, case if len(parameters) > 1 else [case], strict=True))
                    torch.manual_seed(seed)
                    with failures.of(", ".join(map(str, own.values()))[:200]), contextlib.ExitStack() as stack:
                        given = {name: fixtures[name] for name in wanted}
                        if folder is not None:
                            below = folder / f"case-{number}"
                            below.mkdir()
                            given |= {"tmp_path": below} if "tmp_path" in wanted else {}
                            if fresh:
                                place = below / given[fresh].relative_to(folder)
                                given[fresh] = shutil.copytree(given[fresh], place)
                        if "monkeypatch" in wanted:
                            given["monkeypatch"] = stack.enter_context(given["monkeypatch"].context())
                        test(**own, **given)

        needed = [*wanted, *(["tmp_path"] if fresh and "tmp_path" not in wanted else [])]
        run.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in needed]
        )
        del run.__wrapped__
        return run

    return decorate
