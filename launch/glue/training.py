"""Trains the runs of `matmix glue`: first those that begin with the source, then those with the weights of MNLI's."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from matmix.launch.glue.plan import GlueRun, Plan
from matmix.launch.glue.results import needs_second, score_second
from matmix.launch.many.failures import Ended
from matmix.launch.many.runs import run_tasks
from matmix.train.process import stop
from matmix.train.run.directory import RunDirectory

logger = logging.getLogger(__name__)


def train(parts: Sequence[tuple[Plan, Sequence[GlueRun]]], parallel: int) -> Ended:
    """Trains what is not finished of the runs of some plans, `parallel` runs at a time, and scores second files.
    Signals stop it as they stop `run_tasks`."""
    runs = [run for _, of_plan in parts for run in of_plan]
    mnli = {id(run): plan.mnli(run.seed) for plan, of_plan in parts for run in of_plan}
    waiting = [run for run in runs if run.config.init.from_ == str(mnli[id(run)])]
    ended = run_tasks([run for run in runs if run not in waiting], parallel)
    if not ended.stopped:
        ready = [run for run in waiting if RunDirectory(mnli[id(run)]).read_summary() is not None]
        for run in waiting:
            if run not in ready:
                logger.warning(f"{run.title}: not started, as MNLI with this seed is not finished")
        ended = ended.then(run_tasks(ready, parallel))
    for plan, of_plan in parts:
        for run in of_plan:
            if stop.received():
                return Ended(ended.failures, stopped=True)
            if run.is_finished() and needs_second(run.task, run.run):
                logger.info(f"{run.title}: scoring {run.task.second}")
                score_second(run.task, plan.folder, run.run)
    return ended
