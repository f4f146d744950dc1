"""What the encoders of a comparison are worth to others: each finished run is fine-tuned on tasks, those of recipes and
those of GLUE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matmix.data.artifacts import shell_line
from matmix.launch.glue.training import train
from matmix.launch.lab.compare.config import FINETUNED, Comparison
from matmix.launch.lab.compare.finetuned import Finetuned, ScoreColumn, Scores
from matmix.launch.lab.compare.finetuned_glue import NAME, PREFIX, FinetunedGlue, GlueSettings, kept_glue, read_glue
from matmix.launch.lab.compare.finetuned_recipe import FinetunedRecipe, kept_recipe_tasks, read_recipe_task
from matmix.launch.many.failures import Ended
from matmix.launch.many.runs import run_tasks
from matmix.launch.many.settings import check_directories
from matmix.launch.many.task import Task

_MEAN = f"{FINETUNED}/mean"
"""The metric of a run that is its mean over the tasks of recipes."""


def read_downstream(words: Sequence[str], comparison: Comparison, glue: GlueSettings | None = None) -> list[Finetuned]:
    """The tasks of these recipes, and with "glue:DIR" those of GLUE in a folder; glue: how, where the command line says
    it. Raises FileNotFoundError or ValueError (one line) for what is wrong in them, and where an entry of the
    comparison cannot be fine-tuned on one."""
    folders = [word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX)]
    if len(folders) > 1:
        raise ValueError(f"--finetune: {PREFIX} is given twice; one folder holds all tasks")
    if glue not in (None, GlueSettings()) and not folders:
        raise ValueError(f"options of GLUE are given without {shell_line('--finetune', f'{PREFIX}DIR')}")
    recipes = [word for word in words if not word.startswith(PREFIX)]
    tasks = [read_recipe_task(word, comparison.home) for word in recipes]
    names = [one.name.lower() for one in tasks]
    for word, one in zip(recipes, tasks, strict=True):
        if names.count(one.name.lower()) > 1:
            raise ValueError(f"--finetune: two tasks are called {one.name}; give their recipes other names")
        if one.name.lower() == NAME:
            raise ValueError(f"--finetune: the name {one.name} is that of GLUE's tasks; give the recipe another one")
        one.check(comparison, word)
    all_glue = [read_glue(folder, glue or GlueSettings(), comparison) for folder in folders]
    for one in all_glue:
        one.check(comparison)
    return [*tasks, *all_glue]


def kept_downstream(home: Path) -> list[Finetuned]:
    """The tasks that runs of the comparison in `home` have been fine-tuned on, by name, those of GLUE last."""
    return [*kept_recipe_tasks(home), *kept_glue(home)]


def keep_downstream(found: Sequence[Finetuned]) -> None:
    """Writes into the folder of the comparison what is fine-tuned."""
    for one in found:
        one.keep()


def train_downstream(found: Sequence[Finetuned], pretrained: Sequence[Task], parallel: int) -> Ended:
    """Fine-tunes these runs, which are finished, `parallel` at a time, those on GLUE last. Signals stop it as they stop
    `run_tasks`. Raises ValueError or FileNotFoundError (one line) before anything is trained."""
    all_glue = [one for one in found if isinstance(one, FinetunedGlue)]
    tasks = [task for one in found if isinstance(one, FinetunedRecipe) for task in one.tasks(pretrained)]
    parts = [one.parts(pretrained) for one in all_glue]
    check_directories([*tasks, *(run for part in parts for _, runs in part for run in runs)])
    ended = run_tasks(tasks, parallel)
    for one, part in zip(all_glue, parts, strict=True):
        if not ended.stopped:
            ended = ended.then(train(part, parallel))
        if not ended.stopped:
            one.tabulate(part)
    return ended


def scores_of(pretrained: Task, downstream: Sequence[Finetuned]) -> Scores:
    """All scores of a run of the comparison that has been fine-tuned, and the mean over the tasks of recipes."""
    found: Scores = {}
    for one in downstream:
        found |= one.scores(pretrained)
    recipes = [one for one in downstream if isinstance(one, FinetunedRecipe)]
    firsts = [found[one.key][0] for one in recipes if one.key in found]
    if len(firsts) == len(recipes) > 1 and all(one.is_share for one in recipes):
        found[_MEAN] = [fmean(firsts)]
    return found


def score_columns(downstream: Sequence[Finetuned]) -> list[ScoreColumn]:
    """What the table can show: the first score of each task, and means over tasks."""
    recipes = [one for one in downstream if isinstance(one, FinetunedRecipe)]
    others = [one for one in downstream if one not in recipes]
    mean = ScoreColumn(key=_MEAN, heading="mean over tasks (%)")
    return [*_columns(recipes), mean, *_columns(others)]


def plan_of_downstream(found: Sequence[Finetuned], tasks: Sequence[Task]) -> str:
    """What would be fine-tuned after these runs."""
    count = sum(one.runs_of_each for one in found) * len(tasks)
    listed = ", ".join(one.plan_words() for one in found)
    return f"then each run is fine-tuned on {listed}: {count:,} runs in {found[0].home / FINETUNED}"


def _columns(downstream: Sequence[Finetuned]) -> list[ScoreColumn]:
    return [column for one in downstream for column in one.columns]
