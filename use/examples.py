"""Scores an encoder on labelled examples: metrics, calibration, and a prediction for each example."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from matmix.data.examples.base import Examples
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.train.config import RunConfig
from matmix.train.evaluators.validation import in_order
from matmix.train.init.start import load_start
from matmix.train.tasks.base import Predicted
from matmix.train.tasks.finetuning.base import ExampleTask, with_labels
from matmix.train.tasks.metrics import as_controls
from matmix.use.finetuning import judging_config
from matmix.use.opening import TrainedModel

_BATCH = 32


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleScores:
    """The predictions of a model for a file of examples."""

    task: ExampleTask
    examples: Examples
    predicted: Predicted
    where: str
    """What the model is from, for people."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, where each prediction is a probability for each of them; else ()."""
        names, values = self.examples.classes.names, self.predicted.values
        one_of_them = values.ndim == 2 and values.shape[1] == len(names) and self.predicted.labels.ndim == 1
        return tuple(names) if one_of_them else ()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the task; {} where no example has a label."""
        return self.task.scores(self.predicted, self.examples) if self.has_labels else {}

    def controls(self) -> dict[str, float]:
        """Returns the scores of answers that look at no example, by their names in records; {} as `metrics` does."""
        return as_controls(self.task.control(self.predicted, self.examples)) if self.has_labels else {}

    @property
    def has_labels(self) -> bool:
        """Says whether any example has a label."""
        return len(with_labels(self.predicted)[1]) > 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a JSON object for each example: its number in the file, from 0 on, the row that errors name it by, and
        the prediction as the task shows it."""
        for number, shown in self.task.prediction_rows(self.predicted, self.examples):
            yield {"example": number, "row": self.examples.rows.lines[number], **shown}


def task_of(opened: TrainedModel) -> str:
    """Returns the task on labelled examples that a run was trained on; "" for other runs and for exports."""
    if opened.run is None:
        return ""
    config = opened.run.config
    return config.objective.name if isinstance(config.task(), ExampleTask) else ""


def score_examples(
    opened: TrainedModel,
    file: str,
    *,
    task: str = "",
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] = (),
    max_length: int = 0,
) -> ExampleScores:
    """Predicts the examples in a file, which may lack labels, with a run that was fine-tuned, or with a run or an
    export that fits a task without training.

    Args:
        task: a task or a recipe; "" for a run that was fine-tuned, which knows its task, columns, classes and lengths.
        columns, labels, max_length: in place of data.examples.columns, .labels and data.seqlen of the recipe; the names
            of an export's classes come before those of a recipe.
    Raises FileNotFoundError or ValueError (one line).
    """
    config, model = _fine_tuned(opened) if not task else _fitting(opened, task, columns or {}, labels, max_length)
    files = dataclasses.replace(config.data.examples, test=file)
    data = dataclasses.replace(config.data, examples=files, workers=0)
    kind = config.task()
    loader = kind.make_loader(
        data, split="test", global_batch_size=_BATCH, micro_batch_size=_BATCH, one_pass=True, seed=config.seed
    )
    examples, outputs = loader.facts.examples, config.model.head.count
    if examples.outputs not in (None, outputs):
        raise ValueError(f"{opened.where} has {outputs} outputs, and {file} is read as examples of {examples.outputs}")
    parts = []
    with torch.inference_mode():
        for batch in loader:
            predicted = kind.costs(model, batch.to(opened.device)).predicted
            parts.append(Predicted(*(values.cpu().numpy() for values in predicted)))
    return ExampleScores(kind, examples, in_order(parts), opened.where)


def _fine_tuned(opened: TrainedModel) -> tuple[RunConfig, Backbone]:
    if not task_of(opened):
        raise ValueError(f"{opened.name} was not fine-tuned on labelled examples: name a task")
    config = opened.run.config
    examples = dataclasses.replace(config.data.examples, tokenizer=str(opened.reader.tokenizer.path))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, examples=examples)), opened.model


def _fitting(
    opened: TrainedModel, task: str, columns: Mapping[str, str], labels: Sequence[str], max_length: int
) -> tuple[RunConfig, Backbone]:
    config = judging_config(opened, task)
    model = build_model(config.model)
    load_start(model, opened.origin)
    given = {"columns": dict(columns), "labels": tuple(labels) or opened.classes}
    examples = dataclasses.replace(config.data.examples, **{key: value for key, value in given.items() if value})
    data = dataclasses.replace(config.data, examples=examples, seqlen=max_length or config.data.seqlen)
    config.model.check_seqlen(data.seqlen)
    return dataclasses.replace(config, data=data), model.to(opened.device).eval()
