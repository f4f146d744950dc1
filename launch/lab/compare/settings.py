"""Equal settings: what the runs of a comparison may differ in, and where they differ in more than that.

Stricter than a run that is started again (`matmix.train.run.directory`), which may go on with another rate or more
steps: numbers in one table are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matmix.data.artifacts import read_json_lines
from matmix.launch.lab.compare.config import Entry
from matmix.launch.lab.compare.width import headdims
from matmix.launch.many.task import Task
from matmix.train.recipe import config_to_dict, differences

# How a run is watched, saved and spread over devices, and where and how its data are read: its loss does not depend on
# these.
_MAY_DIFFER = (
    *("run_dir", "device", "stop_step", "micro_batch_size", "max_bad_steps", "gc_every"),
    *("logging.", "checkpoint.", "faults.", "engine."),
    *("data.path", "data.validation_path", "data.workers", "data.worker_start", "data.prefetch", "data.verify"),
    *("data.cache_dir", "data.cache_gigabytes"),
    "evaluation.ablation_batches",
)
_MAY_NOT_DIFFER = ("engine.precision",)


def matters(key: str) -> bool:
    """Whether two runs that differ in this key of their configs are trained differently."""
    return key in _MAY_NOT_DIFFER or not any(
        key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in _MAY_DIFFER
    )


def other_settings(task: Task) -> str:
    """In which settings the run that lies there differs from the comparison's; "" if it does not, or has not begun."""
    run = task.run
    if not run.config_path.is_file():
        return ""
    try:
        found = config_to_dict(run.read_config())
    except ValueError as error:
        return str(error)
    texts = [f"{key}: {old!r} there, {new!r} here" for key, old, new in differences(found, task.config) if matters(key)]
    for change in _changes(task):
        if matters(change["key"]) and change["step"] and f"{change['key']}: " not in " ".join(texts):
            texts.append(f"{change['key']}: {change['old']!r} until step {change['step']}, then {change['new']!r}")
    return "; ".join(texts)


def check_directories(tasks: Sequence[Task]) -> None:
    """Raises ValueError (one line), before anything is trained, where a folder holds a run with other settings or
    something that is not a run."""
    for task in tasks:
        if others := other_settings(task):
            raise ValueError(
                f"{task.title}: {task.run.where} was trained with other settings ({others}), and runs of a table are "
                f"trained alike; give these, or another --run-dir (--report leaves this run out)"
            )
        try:
            task.run.check(task.config)
        except ValueError as error:
            raise ValueError(f"{task.title}: {error}") from None


def differing_keys(entries: Sequence[Entry]) -> list[str]:
    """Keys outside of `[model]` in which entries differ: with any of them they are not trained alike."""
    return sorted(key for key in _values(entries) if not key.startswith("model."))


def words_on_differences(entries: Sequence[Entry]) -> list[str]:
    """How the entries of a table differ in more than their mixers: one line for each subject."""
    lines = []
    if keys := differing_keys(entries):
        lines.append(f"Not alike in all entries: {', '.join(keys)}.")
    if changed := [f"{entry.name} {pairs}" for entry in entries if (pairs := changed_headdims(entry))]:
        lines.append(f"Headdim other than the recipe's, for equal parameters: {', '.join(changed)}.")
    for key, values in sorted(_values(entries).items()):
        if key.startswith("model.") and not key.startswith(("model.layers", "model.mixers.", "model.d_model")):
            lines.append(f"{key}: {_by_value([entry.name for entry in entries], values)}.")
    return lines


def changed_headdims(entry: Entry) -> str:
    """As in "16 -> 20"; "" where the recipe's is kept."""
    pairs = [(entry.own_headdims.get(name, headdim), headdim) for name, headdim in headdims(entry.config.model).items()]
    return ", ".join(f"{own} -> {headdim}" for own, headdim in pairs if own != headdim)


def _values(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """Key -> its value in each entry, of the keys in which entries differ."""
    first = entries[0].config
    changes = [
        {key: (old, new) for key, old, new in differences(config_to_dict(first), entry.config)} for entry in entries
    ]
    firsts = {key: old for change in changes for key, (old, _) in change.items()}
    return {key: [change.get(key, (None, old))[1] for change in changes] for key, old in firsts.items()}


def _by_value(names: Sequence[str], values: Sequence[Any]) -> str:
    """The entries that have each value; the most frequent value stands last, without their names."""
    owners: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        owners.setdefault(str(value).lower() if isinstance(value, bool) else str(value), []).append(name)
    *few, (usual, _) = sorted(owners.items(), key=lambda item: len(item[1]))
    return "; ".join([*(f"{value} in {', '.join(who)}" for value, who in few), f"{usual} in the others"])


def _changes(task: Task) -> list[dict[str, Any]]:
    """What was changed on the way (changes.jsonl of the run)."""
    return [change for change in read_json_lines(task.run.path / "changes.jsonl") if {"key", "step"} <= change.keys()]
