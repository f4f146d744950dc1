"""Runs that were left alone, for comparison, and the process that starts the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For `import fault_harness`, as in the processes that it starts.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fault_harness import Run, Zygote

# Every step recorded, every fifth saved, evaluated twice; the small model makes a step of a few milliseconds.
SETTINGS = (
    *("--steps", "30", "--checkpoint.every", "5", "--evaluation.every", "15", "--logging.every", "1"),
    *("--model.n-layers", "1", "--global-batch-size", "4"),
)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def make_run(zygote, dataset, tmp_path) -> Iterator:
    """`make_run(*overrides, ranks=1)`: a new run of the small recipe; its processes end with the test."""
    runs: list[Run] = []

    def make(*overrides: str, **options) -> Run:
        runs.append(Run(zygote, tmp_path / f"run-{len(runs)}", dataset, *SETTINGS, *overrides, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def _reference(zygote, dataset, folder: Path, ranks: int, *overrides: str) -> Run:
    run = Run(zygote, folder, dataset, *SETTINGS, *overrides, ranks=ranks)
    run.finish()
    assert [step for step, *_ in run.curve()] == list(range(1, 31))
    return run


@pytest.fixture(scope="session")
def one_rank(zygote, dataset, tmp_path_factory) -> Run:
    """A run of one rank that nothing happened to."""
    return _reference(zygote, dataset, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="session")
def two_ranks(zygote, dataset, tmp_path_factory) -> Run:
    """A run of two ranks that nothing happened to."""
    return _reference(zygote, dataset, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="session")
def two_copies(zygote, dataset, tmp_path_factory) -> Run:
    """A run of two ranks that each hold all of the model, that nothing happened to."""
    return _reference(zygote, dataset, tmp_path_factory.mktemp("copies"), 2, "--engine.name", "ddp")


@pytest.fixture(scope="session")
def half_done(zygote, dataset, tmp_path_factory) -> Run:
    """A run of one rank that stopped in the middle, with two checkpoints."""
    run = Run(zygote, tmp_path_factory.mktemp("half"), dataset, *SETTINGS)
    run.finish("--stop-step", "15")
    assert run.checkpoints() == ["step-00000010", "step-00000015"]
    return run
