"""What the encoders of a comparison are worth to others: each finished run is fine-tuned, with its own seed, on tasks.

COMPARISON/finetune/<task>/recipe.toml               the recipe of the task
COMPARISON/finetune/<task>/<entry>/<variant>/seed-0  a run that begins with COMPARISON/<entry>/<variant>/seed-0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from matmix.data.storage.files import write_atomic
from matmix.launch.finetune import finetuning_config, on_examples, planned_config, read_task
from matmix.launch.lab.compare.config import FINETUNED, Comparison
from matmix.launch.many.finetunings import summarize
from matmix.launch.many.settings import matters
from matmix.launch.many.task import Task
from matmix.train.config import RunConfig
from matmix.train.recipe import config_to_dict, differences, find_recipe
from matmix.train.run.directory import RunDirectory
from matmix.train.tasks.base import Metric

MEAN = f"{FINETUNED}/mean"
"""The metric of a run that is its mean over all tasks."""
_RECIPE = "recipe.toml"


@dataclasses.dataclass(frozen=True, slots=True)
class Downstream:
    """A task that the runs of a comparison are fine-tuned on."""

    name: str
    recipe: Path
    values: Mapping[str, Any]
    """Those of the recipe."""
    metric: Metric
    """The first of the task."""
    home: Path
    """The folder of the comparison."""

    @property
    def folder(self) -> Path:
        return self.home / FINETUNED / self.name

    @property
    def key(self) -> str:
        """What its metric is called among those of a pretrained run."""
        return f"{FINETUNED}/{self.name}/{self.metric.name}"

    @property
    def is_share(self) -> bool:
        """Whether its metric is shown in percent: shares, and correlations."""
        return self.metric.unit == "%" or (self.metric.higher_is_better and not self.metric.unit)

    @property
    def heading(self) -> str:
        return f"{self.name}: {self.metric.title} (%)" if self.is_share else f"{self.name}: {self.metric.heading}"

    @property
    def words(self) -> str:
        """What its numbers are, in a sentence."""
        best = self.values.get("evaluation", {}).get("best", "")
        which = f"best evaluation by {best}" if best else "last evaluation"
        return f"{self.name}: {self.metric.title} of the fine-tuned runs in their {which}."

    def run_dir(self, pretrained: Task) -> Path:
        """Where a run of the comparison is fine-tuned."""
        return self.folder / pretrained.run.path.relative_to(self.home)

    def tasks(self, pretrained: Sequence[Task]) -> list[Task]:
        """The fine-tunings of these runs, which are finished. Raises ValueError or FileNotFoundError (one line)."""
        found, outputs = [], []
        for task in pretrained:
            config = finetuning_config(str(task.run.path), str(self.recipe), outputs)
            outputs = ["--model.head.outputs", str(config.model.head.outputs)]  # they read the same examples
            run_dir = self.run_dir(task)
            config = _as_begun(dataclasses.replace(config, seed=task.seed, run_dir=str(run_dir)))
            found.append(Task(entry=f"{task.entry} on {self.name}", seed=task.seed, config=config))
        return found

    def score(self, pretrained: Task) -> float | None:
        """The metric of the fine-tuning of a run; None where that is not finished."""
        run = RunDirectory(self.run_dir(pretrained))
        try:
            config = dataclasses.replace(run.read_config(), run_dir=str(run.path))
        except (FileNotFoundError, ValueError):
            return None
        found = summarize([Task(entry=pretrained.entry, seed=pretrained.seed, config=config)])
        return found[self.metric.name][0] if self.metric.name in found else None


def read_downstream(words: Sequence[str], comparison: Comparison) -> list[Downstream]:
    """The tasks of these recipes. Raises FileNotFoundError or ValueError (one line) for what is wrong in them, and
    where an entry of the comparison cannot be fine-tuned on one."""
    found = [_read(word, find_recipe(word), Path(word).stem, comparison.home) for word in words]
    names = [one.name.lower() for one in found]
    for word, one in zip(words, found, strict=True):
        if names.count(one.name.lower()) > 1:
            raise ValueError(f"--finetune: two tasks are called {one.name}; give their recipes other names")
        for entry in comparison.entries:
            words_of_entry = f'entry "{entry.title}"'
            config = planned_config(str(one.recipe), entry.config.model, words_of_entry)
            if entry.config.data.synthetic.task and not config.data.examples.tokenizer:
                raise ValueError(f"{words_of_entry} has no tokenizer: set data.examples.tokenizer in {word}")
        _check_examples(config, word)
        _check_kept(one, config, comparison)
    return found


def kept_downstream(home: Path) -> list[Downstream]:
    """The tasks that runs of the comparison in `home` have been fine-tuned on, by name."""
    recipes = sorted((home / FINETUNED).glob(f"*/{_RECIPE}"))
    return [_read(str(recipe), recipe, recipe.parent.name, home) for recipe in recipes]


def keep_downstream(found: Sequence[Downstream]) -> None:
    """Writes the recipes of the tasks into the folder of the comparison."""
    for one in found:
        one.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(one.folder / _RECIPE, tomli_w.dumps(one.values))


def scores_of(pretrained: Task, downstream: Sequence[Downstream]) -> dict[str, float]:
    """`Downstream.key` -> score, of the tasks that a run of the comparison has been fine-tuned on, and the mean."""
    found = {one.key: score for one in downstream if (score := one.score(pretrained)) is not None}
    if len(found) == len(downstream) > 1 and all(one.is_share for one in downstream):
        found[MEAN] = fmean(found.values())
    return found


def plan_of_downstream(found: Sequence[Downstream], tasks: Sequence[Task]) -> str:
    """What would be fine-tuned after these runs."""
    listed = ", ".join(f"{one.name} ({one.metric.title})" for one in found)
    count = len(found) * len(tasks)
    return f"then each run is fine-tuned on {listed}: {count:,} runs in {found[0].home / FINETUNED}"


def _read(word: str, recipe: Path, name: str, home: Path) -> Downstream:
    values, kind = read_task(str(recipe), [])
    kind = on_examples(kind, values, word)
    return Downstream(name, recipe, values, (*kind.metrics, kind.loss_metric)[0], home)


def _check_examples(config: RunConfig, word: str) -> None:
    for split in ("train", "validation"):
        try:
            path = config.data.examples.path(split)
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
        if not Path(path).exists():
            raise FileNotFoundError(f"{word}: examples not found: {path}")


def _check_kept(one: Downstream, config: RunConfig, comparison: Comparison) -> None:
    """Raises ValueError (one line) where the task stood for other settings before; config: of the last entry."""
    kept = one.folder / _RECIPE
    if not kept.is_file():
        return
    last = comparison.entries[-1]
    before = config_to_dict(planned_config(str(kept), last.config.model, last.title))
    texts = [f"{key}: {old!r} there, {new!r} here" for key, old, new in differences(before, config) if matters(key)]
    if texts:
        raise ValueError(
            f"--finetune {one.name}: {one.folder} was fine-tuned with other settings ({'; '.join(texts)}), and runs of "
            "a table are trained alike; give these, or a recipe of another name"
        )


def _as_begun(config: RunConfig) -> RunConfig:
    """`config` with what the run of a comparison which was moved began with, read when it began and never again."""
    run = RunDirectory(config.run_dir)
    if not run.config_path.is_file():
        return config
    begun = run.read_config()
    examples = dataclasses.replace(config.data.examples, tokenizer=begun.data.examples.tokenizer)
    data = dataclasses.replace(config.data, examples=examples)
    return dataclasses.replace(config, init=dataclasses.replace(config.init, from_=begun.init.from_), data=data)
