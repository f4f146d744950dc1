"""Writes the part of an export's model card that tells of the run: data, optimizer, losses, controls and scores."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import one_line, read_json_lines
from matmix.data.manifest import Manifest
from matmix.data.modalities import Modality, modality_of
from matmix.data.storage.storage import Storage
from matmix.model.build import count_parameters
from matmix.model.config import ModelConfig
from matmix.model.mixers.convolutions.short import Convolution
from matmix.train.arguments import find_part
from matmix.train.config import RunConfig
from matmix.train.evaluators.base import of_averaged
from matmix.train.run.directory import RunDirectory
from matmix.train.run.trained import Trained
from matmix.train.tasks import TASKS, Task, unit_of
from matmix.train.tasks.image_classification import ImageClassification
from matmix.train.tasks.metrics import control_of
from matmix.train.tasks.token_prediction import TokenPrediction

NONE_KNOWN = (
    "No run of a control is known, such as the same model trained without mixers: what the mixers are good for, these\n"
    "numbers do not show. `matmix compare` trains controls, and `matmix export --control RUN` names one."
)


def notes_on(trained: Trained, controls: Sequence[str] = ()) -> str:
    """Returns Markdown: a table of the training, and one of losses. controls: runs whose losses stand beside it.

    Raises ValueError (one line) where such a run cannot.
    """
    data, evaluation = known_data(trained), evaluation_of(trained)
    config, counted = trained.config, trained.manifest["extra"]["train_state"]
    sequences = "examples, texts of up to" if config.data.examples.train else "sequences of"
    unit, batch = unit_of(config.objective.name), f"{config.global_batch_size:,}"
    rows = {
        **data.rows(),
        f"{unit} seen": f"{counted['tokens']:,}",
        "batch": f"{batch} {sequences} {config.data.seqlen:,} tokens" if unit == "tokens" else f"{batch} {unit}",
        "objective": config.objective.name,
        "optimizer": f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}, weight decay "
        f"{config.optimizer.weight_decay:g}, gradients clipped at {config.optimizer.max_grad_norm:g}",
        "schedule": f"{config.schedule.name}, {_warmup(config)} of warm-up, {config.steps:,} steps in all",
        "precision": config.engine.precision,
        "seed": str(config.seed),
        "weights": f"their moving average, decay {config.ema.decay:g}" if trained.which == "ema" else "",
        **dict(_measured(trained, evaluation, counted["step"])),
    }
    lines = [f"| {name} | {one_line(value).replace('|', ' ')} |" for name, value in rows.items() if value]
    table = "\n".join([f"Trained for {counted['step']:,} steps with matmix:", "", "| | |", "|---|---|", *lines])
    losses = controls_section(trained, data, controls, evaluation)
    return f"{table}\n\n{losses}".rstrip()


def _warmup(config: RunConfig) -> str:
    warmup = config.schedule.warmup
    return f"{warmup:,g} steps" if warmup >= 1 else f"{warmup:.1%}"


def _measured(trained: Trained, evaluation: dict[str, Any], step: int) -> Iterator[tuple[str, str]]:
    """Yields the last losses and metrics up to `step`, as far as the run's records are at hand."""
    records = [
        record
        for record in read_json_lines(trained.run.path / "metrics.jsonl")
        if isinstance(record.get("step"), int) and record["step"] <= step
    ]
    training = [record for record in records if record.get("kind") == "train"]
    if training:
        yield from _numbers(
            trained.config, {"loss": training[-1].get("loss")}, f"training, step {training[-1]['step']:,}"
        )
    where = f"validation, step {evaluation.get('step', step):,}"
    yield from _numbers(trained.config, evaluation, where)


def _numbers(config: RunConfig, measured: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yields titles and values of a task's measures. A task from outside is not imported for a card: its measures have
    their names for titles."""
    if config.objective.name not in TASKS:
        numbers = {name: value for name, value in measured.items() if type(value) is float}
        yield from ((f"{name.replace('_', ' ')} ({where})", f"{value:.4f}") for name, value in numbers.items())
        return
    task = config.task()
    for metric in (task.loss_metric, *task.metrics):
        if type(value := measured.get(metric.name)) is float:
            yield f"{metric.title} ({where})", metric.number(value)
            if type(control := control_of(metric, measured)) is float:
                yield f"{metric.title} of {metric.control} ({where})", metric.number(control)


# -- Data --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KnownData:
    """The data of a run."""

    modality: Modality
    names: tuple[str, ...]
    """URLs as they are, local ones by their last folder or file: a card is for others."""
    manifests: tuple[Manifest | None, ...]
    """Of the prepared datasets in `names`; None where one is not at hand, or was made again with another tokenizer."""

    def rows(self) -> dict[str, str]:
        """Returns names and values for the card's table."""
        rows = {"data": ", ".join(self.names)}
        for name, manifest in zip(self.names, self.manifests, strict=False):
            if manifest is not None:
                which = f" of {name}" if len(self.names) > 1 else ""
                held = [f"{split} {self.modality.split_words(info)}" for split, info in manifest.splits.items()]
                rows[f"documents{which}"] = "; ".join(held)
        return rows

    def trivial_losses(self, trained: Trained) -> list[tuple[str, float]]:
        """Returns the losses in nats of models that know nothing, or only frequencies: for tokens and images."""
        config = trained.config
        task = find_part(config.objective.name, TASKS, "objective.name", Task)
        if issubclass(task, ImageClassification):
            return [(f"every class alike: ln {config.model.head.outputs:,}", math.log(config.model.head.outputs))]
        if not issubclass(task, TokenPrediction) or not self.manifests:
            return []
        losses = [(f"every token alike: ln {config.model.vocab_size:,}", math.log(config.model.vocab_size))]
        if len(self.manifests) == 1 and self.manifests[0] is not None and self.manifests[0].unigram_entropy:
            losses.append(("frequencies of single tokens: their entropy", self.manifests[0].unigram_entropy))
        return losses


def known_data(trained: Trained) -> KnownData:
    """Finds the data of a run, as far as it is at hand. A task from outside is not imported for that."""
    data = trained.config.data
    modality = modality_of(data)
    manifests = tuple(_manifest(path, trained) for path in modality.datasets(data))
    return KnownData(modality=modality, names=tuple(modality.names(data)), manifests=manifests)


def _manifest(path: str, trained: Trained) -> Manifest | None:
    try:
        manifest = Storage(path, trained.config.data.cache_dir).manifest
    except (OSError, ValueError):  # a card says what is known, and needs no dataset
        return None
    wanted = trained.manifest["extra"].get("tokenizer_sha256")
    same = manifest.tokenizer is None or wanted in (None, manifest.tokenizer.sha256)
    return manifest if same else None


# -- Losses of other models --------------------------------------------------------------------------------------------


def controls_section(trained: Trained, data: KnownData, controls: Sequence[str], evaluation: dict[str, Any]) -> str:
    """Returns a Markdown table of losses, with a sentence where no control is known; "" without an evaluation.

    Raises ValueError (one line) where a run of `controls` cannot stand beside the model."""
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


def validation_of(folder: Path, step: int, kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns `kept` where there is one, else the last evaluation up to a step in the run's records."""
    records = read_json_lines(folder / "metrics.jsonl")
    known = [
        r for r in records if r.get("kind") == "validation" and isinstance(r.get("step"), int) and r["step"] <= step
    ]
    return kept or (known or [{}])[-1]


def evaluation_of(trained: Trained) -> dict[str, Any]:
    """Returns the last evaluation of the checkpoint's weights."""
    extra = trained.manifest["extra"]
    evaluation = validation_of(trained.run.path, extra["train_state"]["step"], extra.get("evaluation"))
    return of_averaged(evaluation) if trained.which == "ema" else evaluation


def _siblings(trained: Trained) -> list[Path]:
    """Returns the other runs of the same comparison with the same seed: COMPARISON/<entry>/seed-0, or
    COMPARISON/<entry>/<variant>/seed-0 of the same variant."""
    run = trained.run.path.resolve()
    if not re.fullmatch(r"seed-\d+", run.name) or len(run.parents) < 3:
        return []
    for home, pattern in ((run.parents[1], f"*/{run.name}"), (run.parents[2], f"*/{run.parent.name}/{run.name}")):
        if (home / "comparison.toml").is_file():
            return [path for path in sorted(home.glob(pattern)) if path != run]
    return []


def _control_beside(trained: Trained, path: Path) -> tuple[str, float] | None:
    """Returns the row of a run of the same comparison if it is finished and a control."""
    run = RunDirectory(path)
    if run.read_summary() is None or not is_control(run.read_config().model):
        return None
    return _control(trained, str(path))


def is_control(model: ModelConfig) -> bool:
    """Says whether a model has no mixers, or only the short convolution that stands in front of some."""
    return set(model.mixer_names()) <= {Convolution.name}


def _control(trained: Trained, path: str) -> tuple[str, float]:
    """Returns the table's words for a run, and its last validation loss."""
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
