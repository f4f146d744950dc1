"""One of the runs that are trained side by side: whether it is finished, or lies there with other settings."""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matmix.data.artifacts import read_json_lines
from matmix.train.config import RunConfig
from matmix.train.guards.best import is_out_of_patience
from matmix.train.loaders import make_loader
from matmix.train.recipe import config_to_dict, differences
from matmix.train.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run."""

    entry: str
    """What is trained: in a comparison the entry's title, its name and, with variants, that of the variant."""
    seed: int
    config: RunConfig
    """With the seed and the run directory."""

    @property
    def title(self) -> str:
        return f"{self.entry}, seed {self.seed}"

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.config.run_dir)

    @property
    def log(self) -> Path:
        return self.run.path / "train.log"

    @property
    def last_step(self) -> int | None:
        """Returns None where `epochs` stand in its place and the run, which counts their steps, has not begun."""
        if self.config.stop_step or not self.config.epochs:
            return self.config.last_step
        begun = config_at(self.run)
        return begun.steps if begun is not None and begun.epochs == self.config.epochs else None

    def is_finished(self) -> bool:
        """Returns True where it was trained to its last step, or to where `evaluation.patience` ended it."""
        summary = self.run.read_summary()
        if summary is None:
            return False
        return summary["step"] == self.last_step or is_out_of_patience(self.config.evaluation, summary.get("best"))


def of_seed(config: RunConfig, seed: int, folder: Path) -> RunConfig:
    """Returns `config` with a seed, for the run of that seed among those in `folder`."""
    return dataclasses.replace(config, seed=seed, run_dir=str(folder / f"seed-{seed}"))


def config_at(run: RunDirectory) -> RunConfig | None:
    """Returns the config of a run as it lies there, wherever it began; None where there is none that can be read."""
    try:
        return dataclasses.replace(run.read_config(), run_dir=str(run.path))
    except (FileNotFoundError, ValueError):
        return None


def by_data(tasks: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Returns the runs that read the same data in the same way, together."""
    groups: dict[str, list[PlannedRun]] = {}
    for task in tasks:
        groups.setdefault(repr(task.config.data), []).append(task)
    return list(groups.values())


def check_data(tasks: Sequence[PlannedRun]) -> None:
    """Raises FileNotFoundError (one line) where no run that is not finished has its data: each would fail by itself;
    and as `check_same_data`."""
    missing = []
    for config in {repr(task.config.data): task.config for task in tasks if not task.is_finished()}.values():
        try:
            make_loader(config, "train", 0, 1).close()
            break
        except FileNotFoundError as error:
            missing.append(error)
    else:
        if missing:
            raise missing[0]
    check_same_data(tasks)


def check_same_data(tasks: Sequence[PlannedRun]) -> None:
    """Raises ValueError (one line) where data that a run is yet to be trained on are here, and hold something else than
    those that a finished one was trained on."""
    for group in by_data(tasks):
        known = [(task, data) for task in group if (data := data_of(task))]
        if not known or all(task.is_finished() for task in group):
            continue
        here = {}
        with contextlib.suppress(FileNotFoundError):  # it is said where the run is trained
            for split in ("train", "validation"):
                with contextlib.closing(make_loader(group[0].config, split, 0, 1)) as loader:
                    here[split] = loader.contents
        for task, there in known:
            if splits := " and ".join(split for split, contents in here.items() if there.get(split) != contents):
                raise ValueError(
                    f"{task.title}: {task.run.where} was trained on other data than lie there now ({splits} split), "
                    "and runs of a table are trained alike; put the old data back, or give another --run-dir"
                )


def data_of(task: PlannedRun) -> dict[str, str] | None:
    """Returns a digest of the contents of each split that a finished run was trained on; None where it is not known."""
    summary = task.run.read_summary() or {}
    return data if isinstance(data := summary.get("data"), dict) else None


def on_other_data(tasks: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Returns the finished runs whose data held something else than those of most others that read the same."""
    others = []
    for group in by_data(tasks):
        known = [(task, json.dumps(data, sort_keys=True)) for task in group if (data := data_of(task)) is not None]
        [(usual, _)] = Counter(data for _, data in known).most_common(1) or [("", 0)]
        others += [task for task, data in known if data != usual]
    return others


# How a run is watched, saved and spread over devices, and where its data are read: the loss does not depend on these.
_MAY_DIFFER = (
    *("run_dir", "device", "stop_step", "micro_batch_size", "max_bad_steps", "gc_every"),
    *("logging.", "checkpoint.", "faults.", "engine."),
    *("data.path", "data.validation_path", "data.workers", "data.worker_start", "data.prefetch", "data.verify"),
    *("data.cache_dir", "data.cache_gigabytes", "data.images.path", "data.images.validation_path"),
    "evaluation.ablation_batches",
)
_MAY_NOT_DIFFER = ("engine.precision", "engine.fp8")


def matters(key: str) -> bool:
    """Returns True where two runs that differ in this key of their configs are trained differently."""
    tables = tuple(allowed for allowed in _MAY_DIFFER if allowed.endswith("."))
    return key in _MAY_NOT_DIFFER or not (key in _MAY_DIFFER or key.startswith(tables))


def words_on_settings(there: RunConfig, here: RunConfig) -> list[str]:
    """Returns the settings in which two configs are trained differently, with both values."""
    changed = differences(config_to_dict(there), here)
    return [f"{key}: {old!r} there, {new!r} here" for key, old, new in changed if matters(key)]


def other_settings(task: PlannedRun) -> str:
    """Says in which settings the run that lies there differs from the task's; "" if in none, or it has not begun."""
    run, wanted = task.run, task.config
    if not run.config_path.is_file():
        return ""
    try:
        begun = run.read_config()
    except ValueError as error:
        return str(error)
    if wanted.epochs and wanted.epochs == begun.epochs:  # the run has counted their steps
        wanted = dataclasses.replace(wanted, steps=begun.steps)
    texts = words_on_settings(begun, wanted)
    for change in read_json_lines(run.path / "changes.jsonl"):  # on the way
        key, step = change.get("key", ""), change.get("step")
        if key and step and matters(key) and f"{key}: " not in " ".join(texts):
            texts.append(f"{key}: {change['old']!r} until step {step}, then {change['new']!r}")
    return "; ".join(texts)


OTHER_SETTINGS = "trained with other settings"


def why_open(task: PlannedRun) -> str:
    """Says why a run has no numbers for a table; "" where it has."""
    if others := other_settings(task):
        return f"{OTHER_SETTINGS}: {others}"
    if task.is_finished():
        return ""
    return "unfinished" if (task.run.path / "metrics.jsonl").is_file() else "missing"


def check_directories(tasks: Sequence[PlannedRun], advice: str = "", *, option: str = "--run-dir") -> None:
    """Raises ValueError (one line) where a folder holds a run with other settings, or something that is not a run.
    option: what names another folder; advice: what else can be done about other settings."""
    alike = f"and runs of a table are trained alike; give these, or another {option}{advice}"
    for task in tasks:
        if others := other_settings(task):
            raise ValueError(f"{task.title}: {task.run.where} was {OTHER_SETTINGS} ({others}), {alike}")
        try:
            task.run.check(task.config)
        except ValueError as error:
            raise ValueError(f"{task.title}: {error}") from None
