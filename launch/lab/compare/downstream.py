"""Fine-tunes each finished run of a comparison on tasks: those of recipes, in COMPARISON/finetune/<task>, and those of
GLUE, in COMPARISON/finetune/glue. Both folders hold what `file` names, and what COMPARISON/<entry>/<variant>/seed-0
becomes in <entry>/<variant>/seed-0: a run, or what `matmix glue` makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import tomli_w

from matmix.data.artifacts import shell_line
from matmix.data.storage.files import write_atomic
from matmix.launch.glue import results
from matmix.launch.glue.plan import GlueRun, GlueSettings, Plan, as_begun, check_options, notes_on, run_in, whole
from matmix.launch.glue.tasks import TASKS, named
from matmix.launch.lab.compare.config import FINETUNED, Comparison
from matmix.launch.many import runs
from matmix.launch.many.planned import (
    PlannedRun,
    check_directories,
    check_same_data,
    config_at,
    of_seed,
    on_other_data,
    words_on_settings,
)
from matmix.launch.many.scores import ScoreColumn, Scores, read_scores
from matmix.model.config import ModelConfig
from matmix.train.arguments import read_table
from matmix.train.config import RunConfig
from matmix.train.recipe_files import find_recipe, read_toml
from matmix.train.run.directory import RunDirectory
from matmix.train.tasks.base import Metric
from matmix.train.tasks.metrics import control_words
from matmix.use.finetuning import finetuning_config, on_examples, planned_config, read_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetuned:
    """Holds what the runs of a comparison are fine-tuned on, in a folder of its own."""

    file: ClassVar[str]
    """In the folder: how they are fine-tuned, `values`."""
    advice: ClassVar[tuple[str, str]]
    """How to give a tokenizer, and what to give in place of other settings than before."""
    name: str
    """That of the folder."""
    home: Path
    """The folder of the comparison."""

    @property
    def folder(self) -> Path:
        return self.home / FINETUNED / self.name

    def folder_of(self, pretrained: PlannedRun) -> Path:
        return self.folder / pretrained.run.path.relative_to(self.home)

    def keep(self) -> None:
        """Writes down into the folder what is fine-tuned, and how."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / self.file, tomli_w.dumps(self.values))

    def check(self, comparison: Comparison) -> None:
        """Raises FileNotFoundError or ValueError (one line) where the encoders of a comparison cannot be fine-tuned so,
        or were fine-tuned with other settings."""
        for entry in comparison.entries:
            words = f'entry "{entry.title}"'
            configs = self.planned(entry.config.model, words)
            if entry.config.data.synthetic.task and not configs[0].data.examples.tokenizer:
                raise ValueError(f"--finetune {self.name}: {words} has no tokenizer: {self.advice[0]}")
        if not (self.folder / self.file).is_file():
            return
        for before, now in zip(self.kept().planned(entry.config.model, words), configs, strict=True):
            if texts := words_on_settings(before, now):
                others = f"{self.folder} was fine-tuned with other settings ({'; '.join(texts)})"
                alike = f"runs of a table are trained alike; give these, or {self.advice[1]}"
                raise ValueError(f"--finetune {self.name}: {others}, and {alike}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetunedRecipe(Finetuned):
    """The task of a recipe."""

    file = "recipe.toml"
    advice = "set data.examples.tokenizer in its recipe", "a recipe of another name"
    recipe: Path
    values: Mapping[str, Any]
    """Those of the recipe."""
    metric: Metric
    """The first of the task."""
    others: Sequence[PlannedRun] = ()
    """Fine-tunings on other examples than those of most, which have no numbers in the table."""

    @classmethod
    def read(cls, recipe: Path, name: str, home: Path) -> FinetunedRecipe:
        """Raises FileNotFoundError or ValueError (one line)."""
        values, kind = read_task(str(recipe), [])
        kind = on_examples(kind, values, name)
        metric = (*kind.metrics, kind.loss_metric)[0]
        return cls(name=name, home=home, recipe=recipe, values=values, metric=metric)

    def kept(self) -> FinetunedRecipe:
        """Returns the task as it was written down."""
        return dataclasses.replace(self, recipe=self.folder / self.file)

    def planned(self, model: ModelConfig, words: str) -> list[RunConfig]:
        """Makes the config, one for each task, of a fine-tuning of a model that is yet to be trained."""
        return [planned_config(str(self.recipe), model, words)]

    def check(self, comparison: Comparison) -> None:
        super().check(comparison)
        [config] = self.planned(comparison.entries[0].config.model, "")
        for split in ("train", "validation"):
            try:
                path = config.data.examples.path(split)
            except ValueError as error:
                raise ValueError(f"--finetune {self.name}: {error}") from None
            if not Path(path).exists():
                raise FileNotFoundError(f"--finetune {self.name}: examples not found: {path}")

    def among(self, pretrained: Sequence[PlannedRun]) -> FinetunedRecipe:
        """Returns the task with what of the fine-tunings of these runs is on other examples."""
        there = [task for one in pretrained if (task := self._there(one)) is not None]
        return dataclasses.replace(self, others=on_other_data(there))

    def key(self, metric: Metric) -> str:
        """Returns the name of its metric among those of a pretrained run."""
        return f"{FINETUNED}/{self.name}/{metric.name}"

    @property
    def is_share(self) -> bool:
        """Returns True where its metric is shown in percent: shares, and correlations."""
        return self.metric.unit == "%" or (self.metric.higher_is_better and not self.metric.unit)

    @property
    def columns(self) -> list[ScoreColumn]:
        key, metric = self.key(self.metric), self.metric
        if self.is_share:
            return [ScoreColumn(key, f"{self.name}: {metric.title} (%)", self.name)]
        return [ScoreColumn(key, f"{self.name}: {metric.heading}", self.name, metric.digits, scale=1)]

    def lines(self, pretrained: Sequence[PlannedRun]) -> list[str]:
        """Says below the table what its numbers are."""
        best = self.values.get("evaluation", {}).get("best", "")
        which = f"best evaluation by {best}" if best else "last evaluation"
        line = f"{self.name}: {self.metric.title} of the fine-tuned runs in their {which}"
        left_out = [f"{self.name}: {task.title} was fine-tuned on other examples than most." for task in self.others]
        evaluations = (metrics for task in pretrained for metrics in self._read(task).evaluations)
        control = control_words(self.metric, next(evaluations, {}))
        return [f"{line}; control without a model {control}." if control else f"{line}.", *left_out]

    def plan_words(self) -> tuple[str, int]:
        """Says in a plan what is fine-tuned, and how many runs each pretrained one has."""
        return f"{self.name} ({self.metric.title})", 1

    def tasks(self, pretrained: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
        """Plans the fine-tunings of these runs, which are finished."""
        for task in pretrained:
            config = finetuning_config(str(task.run.path), str(self.recipe), [])
            config = as_begun(of_seed(config, task.seed, self.folder_of(task).parent))
            yield PlannedRun(entry=f"{task.entry} on {self.name}", seed=task.seed, config=config)

    def scores(self, pretrained: PlannedRun) -> dict[str, list[float]]:
        """Returns all metrics of the finished fine-tunings of a run."""
        scores = self._read(pretrained)
        return {self.key(metric): scores.values(metric.name) for metric in scores.known}

    def _read(self, pretrained: PlannedRun) -> Scores:
        task = self._there(pretrained)
        return read_scores([] if task is None or task in self.others else [task])

    def _there(self, pretrained: PlannedRun) -> PlannedRun | None:
        config = config_at(RunDirectory(self.folder_of(pretrained)))
        return None if config is None else dataclasses.replace(pretrained, config=config)


NAME = "glue"
_MORE = "tasks", "seeds"
"""Settings of which every command may add some."""
PREFIX = f"{NAME}:"
"""Before the folder of the download, in place of a recipe."""
_OPTION = "--glue."
"""Before the name of a field of GLUE's recipes."""
_OURS = {"--seed": "--glue-seeds", "--run-dir": "--run-dir of the comparison"}
_OURS |= {f"--data.examples.{split}": "--finetune glue:DIR" for split in ("train", "validation")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetunedGlue(Finetuned):
    """GLUE, in a comparison."""

    file = "glue.toml"
    advice = "give --glue.data.examples.tokenizer", "another --run-dir"
    name: str = NAME
    settings: GlueSettings
    """With the names of the tasks; without seeds, each run has its own."""
    notes: Sequence[str] = ()
    """Lines of a table about the files of the tasks."""

    @classmethod
    def read(cls, given: GlueSettings, home: Path) -> FinetunedGlue:
        """Reads GLUE's tasks in a folder. Raises FileNotFoundError or ValueError (one line)."""
        files = whole(Path(given.folder), named(given.tasks, "--glue-tasks"))
        tasks = tuple(one.task.name for one in files)
        return cls(settings=dataclasses.replace(given, tasks=tasks), home=home, notes=notes_on(files))

    def kept(self) -> FinetunedGlue:
        """Returns the same tasks with the settings that were written down. Raises ValueError (one line)."""
        settings = self.kept_settings()
        tasks = self.settings.tasks or settings.tasks
        return dataclasses.replace(self, settings=dataclasses.replace(settings, tasks=tasks))

    def kept_settings(self) -> GlueSettings:
        """Returns the settings as they were written down, its own where none were. Raises ValueError (one line)."""
        path = self.folder / self.file
        if not path.is_file():
            return self.settings
        settings = read_table(GlueSettings, read_toml(path), str(path))
        try:
            named(settings.tasks)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return settings

    @property
    def values(self) -> dict[str, Any]:
        return dataclasses.asdict(self.settings)

    def keep(self) -> None:
        """Writes down the tasks and the seeds together with those that were written down before."""
        there = self.kept_settings()
        both = {name: tuple(dict.fromkeys((*getattr(there, name), *getattr(self.settings, name)))) for name in _MORE}
        Finetuned.keep(dataclasses.replace(self, settings=dataclasses.replace(self.settings, **both)))

    def check(self, comparison: Comparison) -> None:
        super().check(comparison)
        there = self.kept_settings().seeds
        if bool(there) != bool(self.settings.seeds):
            before = f"--glue-seeds {' '.join(map(str, there))}" if there else "no --glue-seeds"
            others = f"{self.folder} was fine-tuned with {before}, and runs of a table are trained alike"
            raise ValueError(f"--finetune {self.name}: {others}; give these, or another --run-dir")

    def planned(self, model: ModelConfig, words: str) -> list[RunConfig]:
        tasks = named(self.settings.tasks)
        return [planned_config(one.recipe, model, words, self.settings.overrides(one)) for one in tasks]

    @property
    def columns(self) -> list[ScoreColumn]:
        words = {name: f"GLUE's {name}" for name in self.settings.tasks}
        count = len(self.settings.seeds) or 1
        columns = [ScoreColumn(_key(name), f"GLUE: {name} (%)", words.get(name, ""), runs=count) for name in TASKS]
        return [*columns, ScoreColumn(_key("average"), "GLUE: average (%)")]

    def lines(self, pretrained: Sequence[PlannedRun]) -> list[str]:
        seeds = self.settings.seeds
        which = f"with the seeds {', '.join(map(str, seeds))} for each run" if seeds else "with the seed of the run"
        titles = {name: [score.title for score in TASKS[name].scores] for name in self.settings.tasks}
        means = [f"{name} of {' and '.join(scores)}" for name, scores in titles.items() if len(scores) > 1]
        line = f"GLUE: the last evaluation of the fine-tuned runs, {which}. {self.settings.words()}"
        lines = [f"{line} Means: {'; '.join(means)}." if means else line]
        every = (run for task in pretrained for seed in self._seeds(task) for run in self._runs(task, seed))
        if alone := dict.fromkeys(run.task.name for run in every if run.begins_alone):
            lines.append(f"GLUE's {', '.join(alone)}: begins with the encoder itself where it has no run on MNLI.")
        return lines

    def plan_words(self) -> tuple[str, int]:
        tasks, asked = self.settings.tasks, self.settings
        return f"GLUE ({', '.join(tasks)}; settings {asked.settings})", len(tasks) * (len(asked.seeds) or 1)

    def plans(self, pretrained: Sequence[PlannedRun]) -> Iterator[Plan]:
        """Plans the fine-tunings of each of these runs, which are finished."""
        for task in pretrained:
            asked = dataclasses.replace(self.settings, seeds=self._seeds(task))
            model = task.title if self.settings.seeds else task.entry
            about = {"source": str(task.run.path), "name": task.title, "model": model, "may_be_moved": True}
            yield Plan(**about, out=self.folder_of(task), asked=asked, notes=self.notes)

    def scores(self, pretrained: PlannedRun) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        for seed in self._seeds(pretrained):
            read = {run.task.name: results.read_run(run).values for run in self._runs(pretrained, seed)}
            metrics = {}
            for name, values in read.items():
                if values:
                    metrics[_key(name)] = fmean(values.values())
                    metrics |= {_key(name, title): value for title, value in values.items()}
            if all(read.get(name) for name in TASKS):
                metrics[_key("average")] = fmean(metrics[_key(name)] for name in TASKS)
            for name, value in metrics.items():
                scores.setdefault(name, []).append(value)
        return scores

    def _seeds(self, pretrained: PlannedRun) -> tuple[int, ...]:
        return self.settings.seeds or (pretrained.seed,)

    def _runs(self, pretrained: PlannedRun, seed: int) -> list[GlueRun]:
        out = self.folder_of(pretrained)
        return [run for task in TASKS.values() if (run := run_in(out, task, seed)) is not None]


def _key(*parts: str) -> str:
    return "/".join([FINETUNED, NAME, *(part.replace(",", "").replace(" ", "_") for part in parts)])


def glue_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the other words and those of --glue.KEY, as options --KEY of recipes. Raises
    ValueError (one line) for keys that differ between the runs."""
    rest: list[str] = []
    own: list[str] = []
    part = rest
    for word in words:
        if word.startswith("--"):
            part = own if word.startswith(_OPTION) else rest
        part.append(f"--{word.removeprefix(_OPTION)}" if word.startswith(_OPTION) else word)
    check_options(own, _OURS)
    return rest, own


def read_downstream(words: Sequence[str], comparison: Comparison, glue: GlueSettings | None = None) -> list[Finetuned]:
    """Reads the tasks of these recipes, and with "glue:DIR" those of GLUE, as `glue` says. Raises
    FileNotFoundError or ValueError (one line) for what is wrong, and entries that cannot be fine-tuned on one."""
    home, glue = comparison.home, glue or GlueSettings()
    folders = [word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX)]
    if len(folders) > 1:
        raise ValueError(f"--finetune: {PREFIX} is given twice; one folder holds all tasks")
    if glue != GlueSettings() and not folders:
        raise ValueError(f"options of GLUE are given without {shell_line('--finetune', f'{PREFIX}DIR')}")
    recipes = [word for word in words if not word.startswith(PREFIX)]
    tasks = [FinetunedRecipe.read(find_recipe(word), Path(word).stem, home) for word in recipes]
    names = [one.name.lower() for one in tasks]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--finetune: two tasks are called {name}; give their recipes other names")
        if name == NAME:
            raise ValueError(f"--finetune: the name {name} is that of GLUE's tasks; give the recipe another one")
    tasks += [FinetunedGlue.read(dataclasses.replace(glue, folder=folder), home) for folder in folders]
    for one in tasks:
        one.check(comparison)
    return tasks


def kept_downstream(home: Path, pretrained: Sequence[PlannedRun]) -> list[Finetuned]:
    """Reads what runs of the comparison in `home` were fine-tuned on, by name, GLUE last. pretrained: its runs."""
    recipes = sorted((home / FINETUNED).glob(f"*/{FinetunedRecipe.file}"))
    tasks = [FinetunedRecipe.read(recipe, recipe.parent.name, home).among(pretrained) for recipe in recipes]
    glue = FinetunedGlue(settings=GlueSettings(), home=home)
    return [*tasks, glue.kept()] if (glue.folder / glue.file).is_file() else tasks


def train_downstream(downstream: Sequence[Finetuned], pretrained: Sequence[PlannedRun], parallel: int) -> runs.Ended:
    """Fine-tunes these runs, which are finished, as `run_tasks` does, those on GLUE last. Raises ValueError or
    FileNotFoundError (one line) before anything is trained."""
    tasks = [task for one in downstream if isinstance(one, FinetunedRecipe) for task in one.tasks(pretrained)]
    plans = [plan for one in downstream if isinstance(one, FinetunedGlue) for plan in one.plans(pretrained)]
    check_directories([*tasks, *(run for plan in plans for run in plan.runs)])
    check_same_data(tasks)
    ended = runs.run_tasks(tasks, parallel)
    if plans and not ended.stopped:
        ended = ended.then(results.train(plans, parallel))
    if not ended.stopped:
        for plan in plans:
            results.write_table(plan, results.collect(plan))
    return ended


_MEAN = ScoreColumn(f"{FINETUNED}/mean", "mean over tasks (%)")
"""The mean of a run over the tasks of recipes."""


def scores_of(pretrained: PlannedRun, downstream: Sequence[Finetuned]) -> dict[str, list[float]]:
    """Returns metric -> values over the fine-tunings of a run, and the mean over the tasks of recipes."""
    scores = {name: values for one in downstream for name, values in one.scores(pretrained).items()}
    recipes = [one for one in downstream if isinstance(one, FinetunedRecipe)]
    firsts = [scores[key][0] for one in recipes if (key := one.key(one.metric)) in scores]
    if len(firsts) == len(recipes) > 1 and all(one.is_share for one in recipes):
        scores[_MEAN.key] = [fmean(firsts)]
    return scores


def score_columns(downstream: Sequence[Finetuned]) -> list[ScoreColumn]:
    """Returns the columns that the table can show: the first score of each task, and means over tasks."""
    recipes = [column for one in downstream if isinstance(one, FinetunedRecipe) for column in one.columns]
    glue = [column for one in downstream if isinstance(one, FinetunedGlue) for column in one.columns]
    return [*recipes, _MEAN, *glue]


def plan_text(downstream: Sequence[Finetuned], tasks: Sequence[PlannedRun]) -> str:
    """Returns lines that tell what would be fine-tuned after these runs."""
    words, counts = zip(*(one.plan_words() for one in downstream), strict=True)
    count = sum(counts) * len(tasks)
    return f"then each run is fine-tuned on {', '.join(words)}: {count:,} runs in {downstream[0].home / FINETUNED}"
