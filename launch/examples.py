"""Scores of an encoder on any labelled examples: metrics, calibration, predictions, a confusion matrix."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from matmix.data.examples.base import Examples
from matmix.data.storage.files import write_atomic
from matmix.launch.figures import MOST_CLASSES, confusion_picture
from matmix.launch.finetune import judging_config
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.model.interop.importing.exported import load_weights, read_labels
from matmix.train.config import RunConfig
from matmix.train.engine.full_state import Weights
from matmix.train.evaluators.scores import in_order
from matmix.train.init.start import load_start
from matmix.train.run.directory import RunDirectory
from matmix.train.run.remote import fetch_run
from matmix.train.run.trained import find_trained
from matmix.train.tasks.base import Predicted
from matmix.train.tasks.finetuning.base import ExampleTask, with_labels
from matmix.train.tasks.metrics import as_controls, control_lines

_BATCH = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Judge:
    """A model that is ready to predict examples."""

    config: RunConfig
    """Of its task and its data, but for the examples."""
    model: Backbone
    where: str
    """What it is from, for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """What a run makes of a file of examples."""

    task: ExampleTask
    examples: Examples
    predicted: Predicted
    where: str
    """As of the judge."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, where each prediction is a probability for each of them; else ()."""
        names, values = self.examples.classes.names, self.predicted.values
        one_of_them = values.ndim == 2 and values.shape[1] == len(names) and self.predicted.labels.ndim == 1
        return tuple(names) if one_of_them else ()

    def metrics(self) -> dict[str, float]:
        """Those of the task; {} where no example has a label."""
        return self.task.scores(self.predicted, self.examples) if self.has_labels else {}

    def controls(self) -> dict[str, float]:
        """What answers score that look at no example, by the names that records have for it; {} as of the metrics."""
        return as_controls(self.task.control(self.predicted, self.examples)) if self.has_labels else {}

    @property
    def has_labels(self) -> bool:
        """Whether any example has a label."""
        return len(with_labels(self.predicted)[1]) > 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """A JSON object for each example: its number in the file, from 0 on, the row that errors name it by, and what
        the task says of it."""
        for number, found in self.task.prediction_rows(self.predicted, self.examples):
            yield {"example": number, "row": self.examples.rows.lines[number], **found}


def task_of(source: str | Path) -> str:
    """The task on labelled examples that the run `source` was trained on; "" of an export, and of other runs."""
    folder, _ = fetch_run(source, weights_only=True)
    if not (folder / "config.toml").is_file():
        return ""
    config = RunDirectory(folder).read_config()
    return config.objective.name if isinstance(config.task(), ExampleTask) else ""


def judge_of_run(source: str | Path, *, step: int | None = None, weights: Weights = "raw") -> Judge:
    """A run that was fine-tuned, at its newest checkpoint or that of `step`, with its weights or their average. Raises
    FileNotFoundError or ValueError (one line)."""
    folder, fetched = fetch_run(source, step=step, weights_only=weights == "raw")
    trained = find_trained(RunDirectory(folder), step, whole=fetched, weights=weights)
    model = build_model(trained.config.model)
    load_weights(model, trained.weights(), folder)
    examples = dataclasses.replace(trained.config.data.examples, tokenizer=str(trained.tokenizer.path))
    data = dataclasses.replace(trained.config.data, examples=examples)
    averaged = ", averaged weights" if weights == "ema" else ""
    where = f"{source}, {trained.checkpoint.name}{averaged}"
    return Judge(dataclasses.replace(trained.config, data=data), model, where)


def judge_of_task(
    source: str | Path,
    task: str,
    *,
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] = (),
    max_length: int = 0,
    step: int | None = None,
    weights: Weights = "raw",
) -> Judge:
    """A run or an export for a task or a recipe that its model fits without training.

    columns, labels, max_length: in place of data.examples.columns, .labels and data.seqlen of the recipe; the names of
    an export's classes come before those of a recipe. Raises FileNotFoundError or ValueError (one line).
    """
    config, start = judging_config(source, task, step=step, weights=weights)
    model = build_model(config.model)
    load_start(model, start)
    names = tuple(labels) or read_labels(fetch_run(source, step=step, weights_only=True)[0])
    given = {"columns": dict(columns or {}), "labels": names}
    examples = dataclasses.replace(config.data.examples, **{key: value for key, value in given.items() if value})
    data = dataclasses.replace(config.data, examples=examples, seqlen=max_length or config.data.seqlen)
    config.model.check_seqlen(data.seqlen)
    return Judge(dataclasses.replace(config, data=data), model, start.words)


@torch.inference_mode()
def judge(by: Judge, file: str) -> Judged:
    """Predicts the examples in `file`, which may lack labels. Raises FileNotFoundError or ValueError (one line)."""
    config, model = by.config, by.model
    files = dataclasses.replace(config.data.examples, test=file)
    data = dataclasses.replace(config.data, examples=files, workers=0)
    task = config.task()
    loader = task.make_loader(
        data, split="test", global_batch_size=_BATCH, micro_batch_size=_BATCH, one_pass=True, seed=config.seed
    )
    examples, outputs = loader.dataset.examples, config.model.head.count
    if examples.outputs not in (None, outputs):
        raise ValueError(f"{by.where} has {outputs} outputs, and {file} is read as examples of {examples.outputs}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    parts = []
    for batch in loader:
        predicted = task.costs(model, batch.to(device)).predicted
        parts.append(Predicted(*(values.cpu().numpy() for values in predicted)))
    return Judged(task, examples, in_order(parts), by.where)


def say(judged: Judged, *, out: Path | None, predictions: Path | None, confusion: Path | None) -> None:
    """Prints the metrics, and writes the files that are named: metrics (.json), predictions (.jsonl), picture (.png).

    Raises ValueError for a picture where there are no classes, no labels, or too many classes.
    """
    metrics, controls = judged.metrics(), judged.controls()
    known = {metric.name: metric for metric in judged.task.metrics}
    if confusion is not None and (not judged.classes or not metrics or len(judged.classes) > MOST_CLASSES):
        raise ValueError(
            f"--confusion draws one class for each example, at most {MOST_CLASSES} of them, against its label"
        )
    print(f"{judged.where}: {len(judged.examples.rows):,} examples in {judged.examples.config.test}")
    for name, value in metrics.items():
        title = known[name].title if name in known else name.replace("_", " ")
        print(f"  {title:<28}{known[name].number(value) if name in known else f'{value:.4f}':>12}")
    for line in control_lines(judged.task.metrics, metrics | controls):
        print(f"  {line}")
    if not metrics:
        print("  no example has a label, so there is nothing to score")
    if out is not None:
        write_atomic(out, json.dumps({**metrics, **controls, "examples": len(judged.examples.rows)}, indent=2) + "\n")
    if predictions is not None:
        write_atomic(predictions, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in judged.rows()))
    if confusion is not None:
        write_atomic(confusion, _picture(judged))


def _picture(judged: Judged) -> bytes:
    values, labels = with_labels(judged.predicted)
    title = f"{judged.where}\n{len(labels):,} examples of {judged.examples.config.test}"
    return confusion_picture(labels, values.argmax(1), judged.classes, title)
