"""Trains the runs of `matmix glue`: first those that begin with the source, then those with the weights of MNLI's."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from matmix.launch.glue.plan import Plan
from matmix.launch.glue.results import needs_second, score_second
from matmix.launch.glue.tasks import TASKS
from matmix.launch.many.failures import Ended
from matmix.launch.many.processes import listening
from matmix.launch.many.runs import run_tasks
from matmix.launch.many.task import Task
from matmix.train.run.directory import RunDirectory

logger = logging.getLogger(__name__)


def train(plan: Plan, runs: Sequence[Task], parallel: int) -> Ended:
    """Trains what is not finished, `parallel` runs at a time, and scores second files. Signals stop it as they stop
    `run_tasks`."""
    waiting = [run for run in runs if run.config.init.from_ == str(plan.mnli(run.seed))]
    with listening():
        ended = run_tasks([run for run in runs if run not in waiting], parallel)
        if not ended.stopped:
            ready = [run for run in waiting if RunDirectory(plan.mnli(run.seed)).read_summary() is not None]
            for run in waiting:
                if run not in ready:
                    logger.warning(f"{run.title}: not started, as MNLI with this seed is not finished")
            later = run_tasks(ready, parallel)
            ended = Ended([*ended.failures, *later.failures], later.stopped)
    if not ended.stopped:
        for run in runs:
            if run.is_finished() and needs_second(TASKS[run.entry], run.run):
                logger.info(f"{run.title}: scoring {TASKS[run.entry].second}")
                score_second(TASKS[run.entry], plan.folder, run.run)
    return ended
