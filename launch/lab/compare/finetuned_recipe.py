"""Fine-tuning the runs of a comparison on a task of one recipe, each with its own seed.

COMPARISON/finetune/<task>/recipe.toml               the recipe of the task
COMPARISON/finetune/<task>/<entry>/<variant>/seed-0  a run that begins with COMPARISON/<entry>/<variant>/seed-0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from matmix.data.storage.files import write_atomic
from matmix.launch.lab.compare.config import FINETUNED, Comparison
from matmix.launch.lab.compare.finetuned import Finetuned, ScoreColumn, Scores, as_begun, check_alike
from matmix.launch.many.finetunings import Scores as OwnScores
from matmix.launch.many.finetunings import read_scores
from matmix.launch.many.task import Task
from matmix.train.config import RunConfig
from matmix.train.recipe_files import find_recipe
from matmix.train.run.directory import RunDirectory
from matmix.train.tasks.base import Metric
from matmix.train.tasks.metrics import control_words
from matmix.use.finetuning import finetuning_config, on_examples, planned_config, read_task

_RECIPE = "recipe.toml"


@dataclasses.dataclass(frozen=True)
class FinetunedRecipe(Finetuned):
    """A task that the runs of a comparison are fine-tuned on."""

    name: str
    recipe: Path
    values: Mapping[str, Any]
    """Those of the recipe."""
    metric: Metric
    """The first of the task."""
    home: Path

    @property
    def key(self) -> str:
        """What its first metric is called among those of a pretrained run."""
        return self._key(self.metric.name)

    @property
    def is_share(self) -> bool:
        """Whether its metric is shown in percent: shares, and correlations."""
        return self.metric.unit == "%" or (self.metric.higher_is_better and not self.metric.unit)

    @property
    def columns(self) -> list[ScoreColumn]:
        if self.is_share:
            return [ScoreColumn(key=self.key, heading=f"{self.name}: {self.metric.title} (%)", task=self.name)]
        heading, digits = f"{self.name}: {self.metric.heading}", self.metric.digits
        return [ScoreColumn(key=self.key, heading=heading, task=self.name, digits=digits, scale=1)]

    def words(self, pretrained: Sequence[Task]) -> list[str]:
        best = self.values.get("evaluation", {}).get("best", "")
        which = f"best evaluation by {best}" if best else "last evaluation"
        said = f"{self.name}: {self.metric.title} of the fine-tuned runs in their {which}"
        evaluations = [found for task in pretrained for found in self._read(task).evaluations]
        control = control_words(self.metric, evaluations[0]) if evaluations else ""
        return [f"{said}; control without a model {control}." if control else f"{said}."]

    def plan_words(self) -> str:
        return f"{self.name} ({self.metric.title})"

    @property
    def runs_of_each(self) -> int:
        return 1

    def keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / _RECIPE, tomli_w.dumps(self.values))

    def tasks(self, pretrained: Sequence[Task]) -> list[Task]:
        """The fine-tunings of these runs, which are finished. Raises ValueError or FileNotFoundError (one line)."""
        found, outputs = [], []
        for task in pretrained:
            config = finetuning_config(str(task.run.path), str(self.recipe), outputs)
            outputs = ["--model.head.outputs", str(config.model.head.outputs)]  # they read the same examples
            run_dir = self.folder_of(task)
            config = as_begun(dataclasses.replace(config, seed=task.seed, run_dir=str(run_dir)))
            found.append(Task(entry=f"{task.entry} on {self.name}", seed=task.seed, config=config))
        return found

    def scores(self, pretrained: Task) -> Scores:
        found = self._read(pretrained)
        return {self._key(metric.name): found.values(metric.name) for metric in found.known}

    def _read(self, pretrained: Task) -> OwnScores:
        """Those of the fine-tuning of a run; without any where it is not finished."""
        run = RunDirectory(self.folder_of(pretrained))
        try:
            config = dataclasses.replace(run.read_config(), run_dir=str(run.path))
        except (FileNotFoundError, ValueError):
            return read_scores([])
        return read_scores([Task(entry=pretrained.entry, seed=pretrained.seed, config=config)])

    def check(self, comparison: Comparison, word: str) -> None:
        """Raises FileNotFoundError or ValueError (one line) where the encoders of a comparison cannot be fine-tuned on
        it, or were fine-tuned with other settings. word: what the command line calls it."""
        for entry in comparison.entries:
            words = f'entry "{entry.title}"'
            config = planned_config(str(self.recipe), entry.config.model, words)
            if entry.config.data.synthetic.task and not config.data.examples.tokenizer:
                raise ValueError(f"{words} has no tokenizer: set data.examples.tokenizer in {word}")
        _check_examples(config, word)
        kept = self.folder / _RECIPE
        if kept.is_file():
            before = planned_config(str(kept), entry.config.model, entry.title)
            check_alike(before, config, self.name, self.folder, "give these, or a recipe of another name")

    def _key(self, metric: str) -> str:
        return f"{FINETUNED}/{self.name}/{metric}"


def read_recipe_task(word: str, home: Path) -> FinetunedRecipe:
    """The task of a recipe. Raises FileNotFoundError or ValueError (one line)."""
    return _read(word, find_recipe(word), Path(word).stem, home)


def kept_recipe_tasks(home: Path) -> list[FinetunedRecipe]:
    """The tasks that runs of the comparison in `home` have been fine-tuned on, by name."""
    recipes = sorted((home / FINETUNED).glob(f"*/{_RECIPE}"))
    return [_read(str(recipe), recipe, recipe.parent.name, home) for recipe in recipes]


def _read(word: str, recipe: Path, name: str, home: Path) -> FinetunedRecipe:
    values, kind = read_task(str(recipe), [])
    kind = on_examples(kind, values, word)
    return FinetunedRecipe(name, recipe, values, (*kind.metrics, kind.loss_metric)[0], home)


def _check_examples(config: RunConfig, word: str) -> None:
    for split in ("train", "validation"):
        try:
            path = config.data.examples.path(split)
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
        if not Path(path).exists():
            raise FileNotFoundError(f"{word}: examples not found: {path}")
