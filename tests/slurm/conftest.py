"""One cluster for all tests of a process; where Slurm is not installed they are skipped, saying what to install."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))  # for `import cluster`

from cluster import Cluster, why_unavailable  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts these tests on one worker (`--dist loadgroup`): they share jobs that take long."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("slurm"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """4 nodes for everyone, and 3 called "shaky" whose failure disturbs no one else."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with Cluster.started(tmp_path_factory.mktemp("slurm"), {"main": 4, "shaky": 3}) as started:
        yield started
