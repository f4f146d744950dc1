"""What the model card of an export says of the run that it is from: data, tokens, optimizer, losses and scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matmix.data.artifacts import one_line, read_json_lines
from matmix.launch.export_controls import controls_section, evaluation_of
from matmix.launch.export_data import known_data
from matmix.train.config import RunConfig
from matmix.train.run.trained import Trained
from matmix.train.tasks import TASKS, unit_of
from matmix.train.tasks.metrics import control_of


def notes_on(trained: Trained, controls: Sequence[str] = ()) -> str:
    """Markdown: a table of the training, and one of losses. controls: runs whose losses stand beside the model's.

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
    """The last losses and metrics up to `step`, as far as the run's records are at hand."""
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
            if type(control := control_of(metric, found)) is float:
                yield f"{metric.title} of {metric.control} ({where})", metric.number(control)
