"""Runs of many models, without processes of their own."""

from __future__ import annotations

import pytest

from matmix.launch.many import runs
from matmix.train.loop import train


@pytest.fixture
def in_this_process(monkeypatch) -> list[str]:
    """Runs of comparisons and of GLUE are trained here, which is faster than processes; their titles, in order."""
    titles = []

    def run_tasks(tasks, parallel):
        for task in tasks:
            if not task.is_finished():
                titles.append(task.title)
                train(task.config)
        return runs.Ended([], stopped=False)

    monkeypatch.setattr(runs, "run_tasks", run_tasks)
    return titles
