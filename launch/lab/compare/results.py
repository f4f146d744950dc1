"""The results of the runs of a comparison, read from their directories."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from matmix.launch.lab.compare.config import Comparison, Entry
from matmix.launch.lab.compare.downstream import kept_downstream, scores_of
from matmix.launch.lab.compare.finetuned import Finetuned, Scores
from matmix.launch.lab.compare.speed import current_rows
from matmix.launch.lab.compare.tasks import tasks_of
from matmix.launch.many.progress import training_records
from matmix.launch.many.settings import other_settings
from matmix.launch.many.spread import spread
from matmix.launch.many.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run."""

    seed: int
    state: Literal["finished", "unfinished", "missing", "other settings"]
    validation: dict[str, float]
    """Metrics of the last step; {} unless finished."""
    curve: list[tuple[int, float]]
    """(step, training loss) of each record; [] of a run with other settings."""
    others: str = ""
    """In which settings it differs from what is compared here."""
    finetuned: Scores = dataclasses.field(default_factory=dict)
    """Its scores on tasks, those of each of its fine-tunings."""

    @property
    def metrics(self) -> dict[str, float]:
        """All that is known of it; of scores on tasks the mean over its fine-tunings."""
        return {**self.validation, **{name: fmean(values) for name, values in self.finetuned.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EntryResult:
    """One entry with all its seeds."""

    entry: Entry
    runs: list[RunResult]
    tokens_per_second: float | None
    peak_bytes: float | None

    def values(self, metric: str) -> list[float]:
        """A metric of the finished runs, by seed; a score on a task of all their fine-tunings."""
        found = []
        for run in self.runs:
            found += run.finetuned.get(metric, [run.validation[metric]] if metric in run.validation else [])
        return found

    def mean(self, metric: str) -> float | None:
        """Its mean over seeds; None where no finished run has it."""
        found = spread(self.values(metric))
        return None if found is None else found.mean

    def ranked_loss(self) -> float | None:
        """Its mean loss, to sort by: NaN, from states that overflow on some text, is infinite and so the worst."""
        loss = self.mean("loss")
        return math.inf if loss is not None and math.isnan(loss) else loss

    @property
    def is_finished(self) -> bool:
        return all(run.state == "finished" for run in self.runs)


def collect(comparison: Comparison) -> list[EntryResult]:
    """All entries of a comparison without variants, or of one of them: the best first, those without a finished run
    last. The best: on generated tasks by accuracy, at the training length and then at longer ones; else by loss."""
    speeds = current_rows(comparison)
    tasks, downstream = tasks_of(comparison), kept_downstream(comparison.home)
    found = []
    for entry in comparison.entries:
        speed = speeds.get(entry.name, {})
        result = EntryResult(
            entry=entry,
            runs=[read_run(task, downstream) for task in tasks if task.entry == entry.title],
            tokens_per_second=speed.get("tokens_per_second"),
            peak_bytes=speed.get("peak_bytes"),
        )
        found.append(result)
    accuracies = accuracy_metrics(found).values()

    def place(result: EntryResult) -> tuple[float, ...]:
        if not result.values("loss"):
            return (1.0,)
        return 0.0, *(-(result.mean(metric) or 0.0) for metric in accuracies), result.ranked_loss()

    return sorted(found, key=place)


def accuracy_metrics(results: Sequence[EntryResult]) -> dict[int, str]:
    """Length as a multiple of the training length -> accuracy there, of generated tasks; {} for what is no such task,
    where chance is not known."""
    metrics = metrics_of(results)
    if "chance_accuracy" not in metrics:
        return {}
    found = {int(match[1] or 1): match[0] for name in metrics if (match := re.fullmatch(r"accuracy(?:_x(\d+))?", name))}
    return dict(sorted(found.items()))


def position_metrics(results: Sequence[EntryResult]) -> dict[str, str]:
    """Bin of positions in the document, such as "4-7" -> loss there, the first bin first."""
    names = [name for name in metrics_of(results) if name.startswith("position_loss/")]
    found = {name.removeprefix("position_loss/"): name for name in names}
    return dict(sorted(found.items(), key=lambda item: int(re.match(r"\d+", item[0])[0])))


def metrics_of(results: Sequence[EntryResult]) -> list[str]:
    """All metrics of the finished runs, in the order in which they are recorded."""
    return list(dict.fromkeys(name for result in results for run in result.runs for name in run.metrics))


def gain_over_no_mixer(result: EntryResult, results: Sequence[EntryResult]) -> float | None:
    """Mean loss of the control without mixers minus the entry's own; None of a control and where either is missing."""
    without = next((other.mean("loss") for other in results if other.entry.control == "no mixer"), None)
    own = result.mean("loss")
    return None if without is None or own is None or result.entry.control == "no mixer" else without - own


def unnamed_folders(comparison: Comparison) -> list[str]:
    """Folders of runs that lie there and that the recipe does not name: other entries, other seeds."""
    named = {task.run.path for task in tasks_of(comparison)}
    depths = ("*/seed-*/config.toml", "*/*/seed-*/config.toml")
    found = {path.parent for depth in depths for path in comparison.home.glob(depth)} - named
    return sorted(str(path.relative_to(comparison.home)) for path in found)


def read_run(task: Task, downstream: Sequence[Finetuned]) -> RunResult:
    """A run as it stands, with its scores on tasks. One with other settings has no numbers here: they belong to another
    comparison."""
    if others := other_settings(task):
        return RunResult(seed=task.seed, state="other settings", validation={}, curve=[], others=others)
    finished = task.is_finished()
    summary = task.run.read_summary() if finished else None
    begun = (task.run.path / "metrics.jsonl").is_file()
    return RunResult(
        seed=task.seed,
        state="finished" if finished else "unfinished" if begun else "missing",
        validation={} if summary is None else summary["validation"],
        curve=[
            (record["step"], record["loss"])
            for record in training_records(task.run.path / "metrics.jsonl")
            if record["loss"] is not None  # every step of it was skipped
        ],
        finetuned=scores_of(task, downstream) if finished else {},
    )
