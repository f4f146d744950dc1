"""What the model card of an export says of the run that it is from: data, tokens, optimizer, losses and scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matmix.data.artifacts import one_line, read_json_lines
from matmix.data.config import DataConfig
from matmix.data.storage.remote import is_url
from matmix.train.config import RunConfig
from matmix.train.evaluators.averaged import of_averaged
from matmix.train.run.trained import Trained
from matmix.train.tasks import TASKS, unit_of


def notes_on(trained: Trained) -> str:
    """A Markdown table. Of local data it names the last folder or the file only: a card is for others."""
    config, counted = trained.config, trained.manifest["extra"]["train_state"]
    sequences = "examples, texts of up to" if config.data.examples.train else "sequences of"
    unit, batch = unit_of(config.objective.name), f"{config.global_batch_size:,}"
    rows = {
        "data": ", ".join(data_names(config.data)),
        f"{unit} seen": f"{counted['tokens']:,}",
        "batch": f"{batch} {sequences} {config.data.seqlen:,} tokens" if unit == "tokens" else f"{batch} {unit}",
        "objective": config.objective.name,
        "optimizer": f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}",
        "weights": f"their moving average, decay {config.ema.decay:g}" if trained.which == "ema" else "",
        **dict(_measured(trained, counted["step"])),
    }
    lines = [f"| {name} | {one_line(value).replace('|', ' ')} |" for name, value in rows.items() if value]
    return "\n".join([f"Trained for {counted['step']:,} steps with matmix:", "", "| | |", "|---|---|", *lines])


def data_names(data: DataConfig) -> list[str]:
    """The datasets of a run: URLs as they are, local ones by their last folder, shares of a mixture in percent; the
    file of the examples that it was fine-tuned on."""
    if data.synthetic.task:
        return [f"{data.synthetic.task} (generated)"]
    if data.examples.train:
        return [f"{Path(data.examples.train).name} (labelled examples)"]
    mixture = data.images.datasets or data.mixture or {data.path: 1.0}
    total = sum(mixture.values())
    shares = {path: f" ({weight / total:.0%})" if len(mixture) > 1 else "" for path, weight in mixture.items()}
    return [(path if is_url(path) else Path(path).name) + share for path, share in shares.items()]


def _measured(trained: Trained, step: int) -> Iterator[tuple[str, str]]:
    """The last losses and metrics up to `step`, as far as the run's records are at hand."""
    records = [
        record
        for record in read_json_lines(trained.run.path / "metrics.jsonl")
        if isinstance(record.get("step"), int) and record["step"] <= step
    ]
    training = [record for record in records if record.get("kind") == "train"]
    evaluations = [record for record in records if record.get("kind") == "validation"]
    evaluation = trained.manifest["extra"].get("evaluation") or (evaluations or [{}])[-1]
    if training:
        yield from _numbers(
            trained.config, {"loss": training[-1].get("loss")}, f"training, step {training[-1]['step']:,}"
        )
    where = f"validation, step {evaluation.get('step', step):,}"
    yield from _numbers(trained.config, of_averaged(evaluation) if trained.which == "ema" else evaluation, where)


def _numbers(config: RunConfig, found: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Titles and values of what a task measures. One from outside is not imported for a card: of its numbers there are
    the names."""
    if config.objective.name not in TASKS:
        numbers = {name: value for name, value in found.items() if type(value) is float}
        yield from ((f"{name.replace('_', ' ')} ({where})", f"{value:.4f}") for name, value in numbers.items())
        return
    task = config.task()
    for metric in (task.loss_metric, *task.metrics):
        if type(value := found.get(metric.name)) is float:
            yield f"{metric.title} ({where})", metric.number(value)
