"""When a rank that hangs may end: once this start's ranks have written their stacks."""

import os
from types import SimpleNamespace

import pytest

from matmix.train.callbacks.watchdog import Watchdog, stacks_path
from matmix.train.run.outcome import ATTEMPT_VARIABLE


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(ATTEMPT_VARIABLE, "7.0")
    return SimpleNamespace(engine=SimpleNamespace(rank=0, world_size=2), path=tmp_path)


def test_stacks_of_an_earlier_start_are_not_counted(run, tmp_path):
    earlier = [stacks_path(tmp_path, "7.0", rank) for rank in range(4)]  # under the same name, with more ranks
    earlier[0].parent.mkdir(parents=True)
    for path in earlier:
        path.write_text("stacks")
        os.utime(path, (1, 1))
    watchdog = Watchdog(minutes=5)
    watchdog.on_start(run)
    try:
        assert watchdog._dumped() == 0
        earlier[1].write_text("stacks")  # rank 1 of this start
        assert watchdog._dumped() == 1
    finally:
        watchdog.on_end(run)
