"""What the model card of an export puts beside the model's validation loss: trivial models, the model without its
mixing, and runs that are controls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import one_line, read_json_lines
from matmix.launch.export_data import KnownData
from matmix.model.build import count_parameters
from matmix.model.config import ModelConfig
from matmix.model.mixers.convolutions.short import Convolution
from matmix.train.evaluators.averaged import of_averaged
from matmix.train.run.directory import RunDirectory
from matmix.train.run.trained import Trained
from matmix.train.tasks import TASKS

NONE_KNOWN = (
    "No run of a control is known, such as the same model trained without mixers: what the mixers are good for, these\n"
    "numbers do not show. `matmix compare` trains controls, and `matmix export --control RUN` names one."
)


def controls_section(trained: Trained, data: KnownData, controls: Sequence[str], evaluation: dict[str, Any]) -> str:
    """A Markdown table of losses, and the sentence that says so where no run is known that is a control. "" of a run
    without an evaluation. Raises ValueError (one line) where a run of `controls` cannot stand beside the model."""
    loss = evaluation.get("loss")
    runs = [_control(trained, path) for path in controls] + [
        row for path in _siblings(trained) if (row := _control_beside(trained, path)) is not None
    ]
    if not isinstance(loss, float) or trained.config.objective.name not in TASKS:
        return ""
    unit = trained.config.task().loss_metric.unit or "nats"
    rows = [("**this model**", loss)]
    if isinstance(without := evaluation.get("loss_without_mixing"), float):
        batches = trained.config.evaluation.ablation_batches
        where = f"in the first {batches:,} global batch{'es' * (batches != 1)} of the validation split"
        if isinstance(gain := evaluation.get("mixing_gain"), float):  # a batch may be easier than the whole split
            where += f", where it has {without - gain:.4f} as it is"
        rows.append((f"this model with each mixer's output replaced by its mean, {where}", without))
    rows += [*dict(runs).items(), *data.trivial_losses(trained)]
    table = [f"| | validation loss, {unit} |", "|---|---|"]
    table += [f"| {one_line(name).replace('|', ' ')} | {value:.4f} |" for name, value in rows]
    return "\n".join([*table, *([] if runs else ["", NONE_KNOWN])])


def validation_of(folder: Path, step: int, found: dict[str, Any] | None = None) -> dict[str, Any]:
    """The last evaluation of a run up to a step, as its records have it; `found`, where there is one, is taken."""
    records = read_json_lines(folder / "metrics.jsonl")
    known = [
        r for r in records if r.get("kind") == "validation" and isinstance(r.get("step"), int) and r["step"] <= step
    ]
    return found or (known or [{}])[-1]


def evaluation_of(trained: Trained) -> dict[str, Any]:
    """The last evaluation of the checkpoint's weights."""
    extra = trained.manifest["extra"]
    found = validation_of(trained.run.path, extra["train_state"]["step"], extra.get("evaluation"))
    return of_averaged(found) if trained.which == "ema" else found


def _siblings(trained: Trained) -> list[Path]:
    """The other runs with the same seed, where this one is a comparison's: COMPARISON/<entry>/seed-0, or
    COMPARISON/<entry>/<variant>/seed-0 of which it is those of the same variant."""
    run = trained.run.path.resolve()
    if not re.fullmatch(r"seed-\d+", run.name) or len(run.parents) < 3:
        return []
    for home, pattern in ((run.parents[1], f"*/{run.name}"), (run.parents[2], f"*/{run.parent.name}/{run.name}")):
        if (home / "comparison.toml").is_file():
            return [path for path in sorted(home.glob(pattern)) if path != run]
    return []


def _control_beside(trained: Trained, path: Path) -> tuple[str, float] | None:
    """A finished run of the same comparison that is a control."""
    run = RunDirectory(path)
    if run.read_summary() is None or not is_control(run.read_config().model):
        return None
    return _control(trained, str(path))


def is_control(model: ModelConfig) -> bool:
    """Whether a model has no mixers, or only the short convolution that stands in front of some."""
    return set(model.mixer_names()) <= {Convolution.name}


def _control(trained: Trained, path: str) -> tuple[str, float]:
    """What a run is, for the table, and its last validation loss."""
    run, ours = RunDirectory(Path(path)), trained.config
    config = run.read_config()
    same = (config.objective.name, config.data.path, config.data.mixture, config.data.seqlen)
    if same != (ours.objective.name, ours.data.path, ours.data.mixture, ours.data.seqlen):
        raise ValueError(
            f"{path} is no control of {trained.run.path}: its objective, data or data.seqlen are others, so that the "
            "losses cannot be compared"
        )
    evaluation = validation_of(run.path, config.steps)
    if not isinstance(loss := evaluation.get("loss"), float):
        raise ValueError(f"{path} has no validation loss in its metrics.jsonl; it cannot stand beside the model")
    mixers = ", ".join(config.model.mixer_names()) or "no mixer"
    size = f"{count_parameters(config.model):,} parameters"
    batches = f"{evaluation['step']:,} steps of {config.global_batch_size:,}"
    return f"control: {mixers} ({size}, {batches}, seed {config.seed})", loss
