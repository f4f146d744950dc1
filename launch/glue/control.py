"""What stands beside the scores: those of an answer that looks at no text."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from matmix.data.examples.base import name_of
from matmix.data.modalities.examples import open_examples
from matmix.train.config import RunConfig
from matmix.train.tasks.base import Predicted
from matmix.train.tasks.finetuning.base import ExampleTask


def most_frequent(config: RunConfig, file: str) -> dict[str, float]:
    """The metrics of a run's task for the most frequent class of its training examples, or for one and the same value,
    as the answer to all examples in `file`. A correlation, which there is none, counts as 0."""
    task = config.task()
    assert isinstance(task, ExampleTask)
    options = dataclasses.replace(config.data.examples, validation=file)
    examples = open_examples(task.examples, dataclasses.replace(config.data, examples=options), "validation")
    numbers = np.arange(len(examples))
    labels = np.concatenate([examples.label(number) for number in numbers])
    values = np.zeros((len(examples), config.model.head.count))
    if examples.classes.names:
        [(name, _)] = collections.Counter(map(name_of, examples.training_labels)).most_common(1)
        values[:, examples.classes.names.index(name)] = 1
    return task.scores(Predicted(numbers, values, labels), examples)
