"""Measures what the encoders of a comparison are worth to others: each finished run is fine-tuned on tasks, those of
recipes and those of GLUE.

COMPARISON/finetune/<task>/recipe.toml               the recipe of a task
COMPARISON/finetune/<task>/<entry>/<variant>/seed-0  a run that begins with COMPARISON/<entry>/<variant>/seed-0
COMPARISON/finetune/glue/glue.toml                   settings, tasks and seeds
COMPARISON/finetune/glue/<entry>/<variant>/seed-0/   what `matmix glue` makes of that run: the runs TASK/seed-N,
                                                     table.md, table.csv, glue.json
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import dacite
import tomli_w

from matmix.data.artifacts import shell_line
from matmix.data.storage.files import write_atomic
from matmix.launch.glue import Column
from matmix.launch.glue.plan import GlueRun, Plan, begins_alone, check_options, notes_on, run_in, whole
from matmix.launch.glue.results import TaskScores, average, collect, read_run, train, write_table
from matmix.launch.glue.tasks import TASKS, GlueTask, Score, named, overrides
from matmix.launch.lab.compare.config import FINETUNED, Comparison
from matmix.launch.many.planned import PlannedRun, check_directories, matters
from matmix.launch.many.runs import Ended, run_tasks
from matmix.launch.many.scores import Scores as OwnScores
from matmix.launch.many.scores import read_scores
from matmix.model.config import ModelConfig
from matmix.train.arguments import DACITE, field_names, unknown_key
from matmix.train.config import RunConfig
from matmix.train.recipe import config_to_dict, differences
from matmix.train.recipe_files import find_recipe, read_toml
from matmix.train.run.directory import RunDirectory
from matmix.train.tasks.base import Metric
from matmix.train.tasks.metrics import control_words
from matmix.use.finetuning import finetuning_config, on_examples, planned_config, read_task

Scores = dict[str, list[float]]
"""Metric of a pretrained run -> its values over the fine-tunings of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoreColumn:
    """A column of the table."""

    key: str
    """What the number is called among the metrics of a pretrained run."""
    heading: str
    task: str = ""
    """The task that a run without the number has not been fine-tuned on; "" where it follows from others."""
    digits: int = 1
    scale: float = 100
    runs: int = 1
    """Fine-tunings of each pretrained run."""


class Finetuned(ABC):
    """Holds what the runs of a comparison are fine-tuned on."""

    name: str
    """That of its folder."""
    home: Path
    """The folder of the comparison."""

    @property
    def folder(self) -> Path:
        return self.home / FINETUNED / self.name

    def folder_of(self, pretrained: PlannedRun) -> Path:
        """Where a run of the comparison is fine-tuned."""
        return self.folder / pretrained.run.path.relative_to(self.home)

    @property
    @abstractmethod
    def columns(self) -> list[ScoreColumn]:
        """Returns the columns of the table."""

    @abstractmethod
    def words(self, pretrained: Sequence[PlannedRun]) -> list[str]:
        """Lines below the table: what its numbers are."""

    @abstractmethod
    def plan_words(self) -> str:
        """The tasks, in a plan."""

    @property
    @abstractmethod
    def runs_of_each(self) -> int:
        """How many fine-tunings a pretrained run has."""

    @abstractmethod
    def keep(self) -> None:
        """Writes down into its folder what is fine-tuned, and how."""

    @abstractmethod
    def scores(self, pretrained: PlannedRun) -> Scores:
        """All metrics of the finished fine-tunings of a run."""


def as_begun(config: RunConfig) -> RunConfig:
    """`config` with what the run of a comparison which was moved began with, read when it began and never again."""
    run = RunDirectory(config.run_dir)
    if not run.config_path.is_file():
        return config
    begun = run.read_config()
    examples = dataclasses.replace(config.data.examples, tokenizer=begun.data.examples.tokenizer)
    data = dataclasses.replace(config.data, examples=examples)
    return dataclasses.replace(config, init=dataclasses.replace(config.init, from_=begun.init.from_), data=data)


def check_alike(before: RunConfig, now: RunConfig, name: str, folder: Path, advice: str) -> None:
    """Raises ValueError (one line) where a task stood for other settings before; advice: what to do then."""
    texts = [
        f"{key}: {old!r} there, {new!r} here"
        for key, old, new in differences(config_to_dict(before), now)
        if matters(key)
    ]
    if texts:
        raise ValueError(
            f"--finetune {name}: {folder} was fine-tuned with other settings ({'; '.join(texts)}), and runs of a table "
            f"are trained alike; {advice}"
        )


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
        """Returns the name of its first metric among those of a pretrained run."""
        return self._key(self.metric.name)

    @property
    def is_share(self) -> bool:
        """Returns True where its metric is shown in percent: shares, and correlations."""
        return self.metric.unit == "%" or (self.metric.higher_is_better and not self.metric.unit)

    @property
    def columns(self) -> list[ScoreColumn]:
        if self.is_share:
            return [ScoreColumn(key=self.key, heading=f"{self.name}: {self.metric.title} (%)", task=self.name)]
        heading, digits = f"{self.name}: {self.metric.heading}", self.metric.digits
        return [ScoreColumn(key=self.key, heading=heading, task=self.name, digits=digits, scale=1)]

    def words(self, pretrained: Sequence[PlannedRun]) -> list[str]:
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

    def tasks(self, pretrained: Sequence[PlannedRun]) -> list[PlannedRun]:
        """The fine-tunings of these runs, which are finished. Raises ValueError or FileNotFoundError (one line)."""
        found, outputs = [], []
        for task in pretrained:
            config = finetuning_config(str(task.run.path), str(self.recipe), outputs)
            outputs = ["--model.head.outputs", str(config.model.head.outputs)]  # they read the same examples
            run_dir = self.folder_of(task)
            config = as_begun(dataclasses.replace(config, seed=task.seed, run_dir=str(run_dir)))
            found.append(PlannedRun(entry=f"{task.entry} on {self.name}", seed=task.seed, config=config))
        return found

    def scores(self, pretrained: PlannedRun) -> Scores:
        found = self._read(pretrained)
        return {self._key(metric.name): found.values(metric.name) for metric in found.known}

    def _read(self, pretrained: PlannedRun) -> OwnScores:
        """Reads the scores of the fine-tuning of a run; there are none where it is not finished."""
        run = RunDirectory(self.folder_of(pretrained))
        try:
            config = dataclasses.replace(run.read_config(), run_dir=str(run.path))
        except (FileNotFoundError, ValueError):
            return read_scores([])
        return read_scores([PlannedRun(entry=pretrained.entry, seed=pretrained.seed, config=config)])

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


NAME = "glue"
PREFIX = f"{NAME}:"
"""Before the folder of the download, in place of a recipe."""
_OPTION = "--glue."
"""Before the name of a field of GLUE's recipes."""
_OURS = {"--seed": "--glue-seeds", "--run-dir": "--run-dir of the comparison"}
_OURS |= {f"--data.examples.{split}": "--finetune glue:DIR" for split in ("train", "validation")}
_KEPT = "glue.toml"
_AVERAGE = f"{FINETUNED}/{NAME}/average"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlueSettings:
    """Holds the settings that are asked for."""

    folder: str = ""
    """Of the public GLUE download."""
    settings: Column = "hydra"
    tasks: tuple[str, ...] = ()
    """Their names; () = all that `folder` has."""
    seeds: tuple[int, ...] = ()
    """Those of the fine-tunings of each run; () = the seed of the run."""
    options: tuple[str, ...] = ()
    """Options of recipes, for all tasks."""

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("--glue-seeds names a seed twice")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"--glue-seeds: seeds are integers >= 0, got {min(self.seeds)}")

    def overrides(self, task: GlueTask) -> list[str]:
        """The options of the recipe of a task that say its settings."""
        return overrides(self.settings, task.name, self.options)


@dataclasses.dataclass(frozen=True)
class FinetunedGlue(Finetuned):
    """GLUE, in a comparison."""

    settings: GlueSettings
    """With the names of the tasks."""
    home: Path
    name: str = NAME

    @property
    def tasks(self) -> list[GlueTask]:
        return named(self.settings.tasks)

    @property
    def columns(self) -> list[ScoreColumn]:
        columns = [
            ScoreColumn(
                key=_key(task),
                heading=f"GLUE: {task.name} (%)",
                task=f"GLUE's {task.name}" if task in self.tasks else "",
                runs=len(self.settings.seeds) or 1,
            )
            for task in TASKS.values()
        ]
        return [*columns, ScoreColumn(key=_AVERAGE, heading="GLUE: average (%)")]

    def words(self, pretrained: Sequence[PlannedRun]) -> list[str]:
        seeds, options = self.settings.seeds, self.settings.options
        which = f"with the seeds {', '.join(map(str, seeds))} for each run" if seeds else "with the seed of the run"
        others = f", and {' '.join(options)}" if options else ""
        means = [
            f"{task.name} of {' and '.join(score.title for score in task.scores)}"
            for task in self.tasks
            if len(task.scores) > 1
        ]
        line = f"GLUE: the last evaluation of the fine-tuned runs, {which}. Settings: {self.settings.settings}{others}."
        lines = [f"{line} Means: {'; '.join(means)}." if means else line]
        alone = {run.task.name: None for task in pretrained for run in self._runs(task) if begins_alone(run)}
        if alone:
            lines.append(f"GLUE's {', '.join(alone)}: begins with the encoder itself where it has no run on MNLI.")
        return lines

    def plan_words(self) -> str:
        return f"GLUE ({', '.join(task.name for task in self.tasks)}; settings {self.settings.settings})"

    @property
    def runs_of_each(self) -> int:
        return len(self.tasks) * (len(self.settings.seeds) or 1)

    def keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / _KEPT, tomli_w.dumps(dataclasses.asdict(self.settings)))

    def parts(self, pretrained: Sequence[PlannedRun]) -> list[tuple[Plan, list[GlueRun]]]:
        """The fine-tunings of these runs, which are finished. Raises ValueError or FileNotFoundError (one line)."""
        found = []
        for task in pretrained:
            plan = Plan(
                source=str(task.run.path),
                name=task.title,
                folder=Path(self.settings.folder),
                out=self.folder_of(task),
                tasks=self.tasks,
                seeds=self._seeds(task),
                settings=self.settings.settings,
                others=self.settings.options,
                model=task.title if self.settings.seeds else task.entry,
            )
            runs = [dataclasses.replace(run, config=as_begun(run.config)) for run in plan.runs()]
            found.append((plan, runs))
        return found

    def tabulate(self, parts: Sequence[tuple[Plan, Sequence[GlueRun]]]) -> None:
        """Writes the table of `matmix glue` for each pretrained run."""
        notes = notes_on(whole(Path(self.settings.folder), self.tasks))
        for plan, runs in parts:
            write_table(plan, collect(plan, runs), notes)

    def scores(self, pretrained: PlannedRun) -> Scores:
        found: Scores = {}
        for seed in self._seeds(pretrained):
            runs = [run for run in self._runs(pretrained) if run.seed == seed]
            results = [TaskScores(task=run.task, runs=[read_run(run)], control={}) for run in runs]
            for result in (result for result in results if result.finished):
                found.setdefault(_key(result.task), []).extend(result.means)
                for score in result.task.scores:
                    found.setdefault(_key(result.task, score), []).extend(result.values(score.title))
            if (over_all := average(results)) is not None:
                found.setdefault(_AVERAGE, []).append(over_all)
        return found

    def check(self, comparison: Comparison) -> None:
        """Raises ValueError (one line) where the encoders of a comparison cannot be fine-tuned so, or were fine-tuned
        with other settings."""
        for entry in comparison.entries:
            words = f'entry "{entry.title}"'
            config = self._planned(self.settings, self.tasks[0], entry.config.model, words)
            if entry.config.data.synthetic.task and not config.data.examples.tokenizer:
                raise ValueError(f"{words} has no tokenizer: give --glue.data.examples.tokenizer")
        if (kept := _read_kept(self.folder / _KEPT)) is not None:
            model = comparison.entries[-1].config.model
            for task in self.tasks:
                before, now = (self._planned(settings, task, model, words) for settings in (kept, self.settings))
                check_alike(before, now, PREFIX + self.settings.folder, self.folder, "give these, or another --run-dir")

    def _planned(self, settings: GlueSettings, task: GlueTask, model: ModelConfig, words: str) -> RunConfig:
        return planned_config(task.recipe, model, words, settings.overrides(task))

    def _seeds(self, pretrained: PlannedRun) -> Sequence[int]:
        return self.settings.seeds or (pretrained.seed,)

    def _runs(self, pretrained: PlannedRun) -> list[GlueRun]:
        """The fine-tunings of a run as they lie there."""
        out = self.folder_of(pretrained)
        found = [run_in(out, task, seed) for task in TASKS.values() for seed in self._seeds(pretrained)]
        return [run for run in found if run is not None]


def glue_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line without those that --glue.KEY begins, and those as options of recipes, --KEY. Raises
    ValueError (one line) for keys that no recipe has, or that differ between the runs."""
    rest: list[str] = []
    own: list[str] = []
    part = rest
    for word in words:
        if word.startswith("--"):
            part = own if word.startswith(_OPTION) else rest
        part.append(f"--{word.removeprefix(_OPTION)}" if word.startswith(_OPTION) else word)
    for word in own:
        key = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--") and key not in field_names(RunConfig):
            raise unknown_key(key, RunConfig, f"command line: {_OPTION}KEY")
    check_options(own, _OURS)
    return rest, own


def read_glue(folder: str, given: GlueSettings, comparison: Comparison) -> FinetunedGlue:
    """GLUE's tasks in a folder. Raises FileNotFoundError or ValueError (one line)."""
    found = whole(Path(folder), named(given.tasks, "--glue-tasks"))
    tasks = tuple(files.task.name for files in found)
    return FinetunedGlue(dataclasses.replace(given, folder=folder, tasks=tasks), comparison.home)


def kept_glue(home: Path) -> list[FinetunedGlue]:
    """GLUE, where runs of the comparison in `home` have been fine-tuned on it. Raises ValueError (one line)."""
    settings = _read_kept(home / FINETUNED / NAME / _KEPT)
    return [] if settings is None else [FinetunedGlue(settings, home)]


def _read_kept(path: Path) -> GlueSettings | None:
    """None where there is no such file. Raises ValueError (one line) for one that says something else."""
    if not path.is_file():
        return None
    values = read_toml(path)
    try:
        settings = dacite.from_dict(GlueSettings, values, DACITE)
        named(settings.tasks)
    except (dacite.DaciteError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return settings


def _key(task: GlueTask, score: Score | None = None) -> str:
    key = f"{FINETUNED}/{NAME}/{task.name}"
    return key if score is None else f"{key}/{score.title.replace(',', '').replace(' ', '_')}"


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


def train_downstream(found: Sequence[Finetuned], pretrained: Sequence[PlannedRun], parallel: int) -> Ended:
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


def scores_of(pretrained: PlannedRun, downstream: Sequence[Finetuned]) -> Scores:
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
    """Returns the columns that the table can show: the first score of each task, and means over tasks."""
    recipes = [one for one in downstream if isinstance(one, FinetunedRecipe)]
    others = [one for one in downstream if one not in recipes]
    mean = ScoreColumn(key=_MEAN, heading="mean over tasks (%)")
    return [*_columns(recipes), mean, *_columns(others)]


def plan_of_downstream(found: Sequence[Finetuned], tasks: Sequence[PlannedRun]) -> str:
    """Returns lines that tell what would be fine-tuned after these runs."""
    count = sum(one.runs_of_each for one in found) * len(tasks)
    listed = ", ".join(one.plan_words() for one in found)
    return f"then each run is fine-tuned on {listed}: {count:,} runs in {found[0].home / FINETUNED}"


def _columns(downstream: Sequence[Finetuned]) -> list[ScoreColumn]:
    return [column for one in downstream for column in one.columns]
