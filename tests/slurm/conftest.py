"""One cluster for all tests of a process; where Slurm is not installed they are skipped, saying what to install.

With `pytest -n auto`, tests/conftest.py gives all of them to one worker: they share jobs that take long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# For `import cluster` and `import slurm_runs`.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import Cluster, why_unavailable
from slurm_runs import SlurmRun
from stories import Stage, Stories

# Nodes that some test harms are nobody else's.
PARTITIONS = {"main": 4, "shaky": 3, "mortal": 3, "mute": 2, "lent": 2}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Idle nodes in the partitions named above; Slurm's commands find this cluster."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with (
        Cluster.started(tmp_path_factory.mktemp("slurm"), PARTITIONS, cpus=2) as started,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(started.config))
        yield started


@pytest.fixture(scope="session")
def stories(
    cluster: Cluster, dataset: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Stories]:
    """All stories of the selected tests, begun together: some work while others wait."""
    functions = (getattr(test, "function", None) for test in request.session.items)
    tests = [function for function in functions if hasattr(function, "story")]
    ranks = {test.alone for test in tests} - {0}
    begun = Stories(Stage(cluster, dataset, tmp_path_factory.mktemp("runs")), [test.story for test in tests], ranks)
    yield begun
    begun.close()


@pytest.fixture
def told(stories: Stories, request: pytest.FixtureRequest) -> Any:
    """What the test's story has yielded, once it has ended."""
    return stories.ends[request.function.story].result()


@pytest.fixture
def alone(stories: Stories, request: pytest.FixtureRequest) -> SlurmRun:
    """The run that nothing happened to, of processes that know nothing of Slurm."""
    return stories.references[request.function.alone].result()
