"""One run with several seeds side by side: RUN_DIR/seed-0 and so on, and RUN_DIR/seeds.json with their scores."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import is_url
from matmix.launch.many.failures import describe_failures
from matmix.launch.many.finetunings import read_scores, scores_json, scores_text
from matmix.launch.many.processes import listening, say
from matmix.launch.many.runs import run_tasks
from matmix.launch.many.settings import check_directories
from matmix.launch.many.task import Task
from matmix.train.config import RunConfig
from matmix.train.run.directory import RunDirectory

SCORES = "seeds.json"


def tasks_of_seeds(config: RunConfig, seeds: Sequence[int]) -> list[Task]:
    """The runs of `config` with each seed, in folders of their own in its run directory.

    Raises ValueError (one line) for seeds that cannot be, and a run directory that holds something else.
    """
    if any(seed < 0 for seed in seeds):
        raise ValueError(f"--seeds: seeds are integers >= 0, got {min(seeds)}")
    if doubled := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ValueError(f"--seeds: {doubled[0]} is given twice")
    home = Path(config.run_dir)
    if is_url(config.run_dir):
        raise ValueError(f"--run-dir {config.run_dir}: runs with several seeds lie in a folder of this machine")
    if home.exists() and not home.is_dir():
        raise ValueError(f"run_dir {home} is a file; choose another --run-dir")
    if RunDirectory(home).config_path.is_file():
        raise ValueError(f"{home} is a run, and not a folder for the runs of several seeds: give another --run-dir")
    tasks = [
        Task(
            entry=home.name,
            seed=seed,
            config=dataclasses.replace(config, seed=seed, run_dir=str(home / f"seed-{seed}")),
        )
        for seed in seeds
    ]
    check_directories(tasks)
    return tasks


def train_seeds(tasks: Sequence[Task], home: Path, parallel: int) -> int:
    """Trains what is not finished, prints the scores of what is, and writes them into `home`; returns the exit code."""
    with listening():
        ended = run_tasks(tasks, parallel)
    if ended.stopped:
        say("Stopped; what was running is saved. The same command goes on from there.")
        return ended.code
    scores = read_scores(tasks)
    if scores.tasks:
        write_atomic(home / SCORES, json.dumps(scores_json(scores), indent=2) + "\n")
        say(f"\n{scores_text(scores)}\n{home / SCORES}")
    if missing := [str(task.seed) for task in tasks if task not in scores.tasks]:
        say(f"Not finished: seed {', '.join(missing)}.")
    if ended.failures:
        say("\n" + describe_failures(ended.failures))
    return ended.code
