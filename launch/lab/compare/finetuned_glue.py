"""Fine-tuning the runs of a comparison on the tasks of GLUE, as `matmix glue` does.

COMPARISON/finetune/glue/glue.toml                  settings, tasks and seeds
COMPARISON/finetune/glue/<entry>/<variant>/seed-0/  what `matmix glue` makes of COMPARISON/<entry>/<variant>/seed-0: the
                                                    runs TASK/seed-N, table.md, table.csv, glue.json
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import dacite
import tomli_w

from matmix.data.storage.files import write_atomic
from matmix.launch.glue.check import notes_on, whole
from matmix.launch.glue.plan import GlueRun, Plan, begins_alone, check_options, run_in
from matmix.launch.glue.results import TaskScores, average, collect, read_run
from matmix.launch.glue.settings import Column, overrides
from matmix.launch.glue.table import write_table
from matmix.launch.glue.tasks import TASKS, GlueTask, Score, named
from matmix.launch.lab.compare.config import FINETUNED, Comparison
from matmix.launch.lab.compare.finetuned import Finetuned, ScoreColumn, Scores, as_begun, check_alike
from matmix.launch.many.task import Task
from matmix.model.config import ModelConfig
from matmix.train.arguments import DACITE, field_names, unknown_key
from matmix.train.config import RunConfig
from matmix.train.recipe_files import read_toml
from matmix.use.finetuning import planned_config

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
    """What is asked for."""

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

    def words(self, pretrained: Sequence[Task]) -> list[str]:
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

    def parts(self, pretrained: Sequence[Task]) -> list[tuple[Plan, list[GlueRun]]]:
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

    def scores(self, pretrained: Task) -> Scores:
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

    def _seeds(self, pretrained: Task) -> Sequence[int]:
        return self.settings.seeds or (pretrained.seed,)

    def _runs(self, pretrained: Task) -> list[GlueRun]:
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
