"""Classes of words, such as parts of speech and names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples, as_list, name_of
from matmix.data.examples.texts import Words
from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import IGNORED
from matmix.train.tasks.base import Loss, Metric, Predicted
from matmix.train.tasks.finetuning.base import MOST_FREQUENT, ClassOptions, ExampleTask, class_cost, most_frequent
from matmix.train.tasks.metrics import share

_ENTITIES = ("B-", "I-")


@dataclass(frozen=True, slots=True)
class TokenClassOptions(ClassOptions):
    strict: bool = False
    """Count as entities what IOB2 allows only; otherwise as conlleval.pl does."""


class TokenClassification(ExampleTask):
    """One class for each word, predicted at its first token. Where the classes are O, B-... and I-... entities are
    scored, otherwise the mean F1 of the classes. Words that were cut off do not count."""

    architectures = ("token_classifier",)
    examples = Words
    target_share = 1.0
    has_classes = True
    Options = TokenClassOptions
    recorded = ("accuracy",)
    loss_metric = Metric(name="loss", title="loss", unit="nats per word")
    metrics = (
        share("entity_f1", "entity F1", MOST_FREQUENT),
        share("accuracy", "accuracy", MOST_FREQUENT),
        share("f1", "mean F1 of the classes", MOST_FREQUENT),
        share("entity_precision", "entity precision"),
        share("entity_recall", "entity recall"),
    )

    def make_loader(self, data: DataConfig, *, split: str, **options: Any) -> Loader:
        """Raises ValueError (one line) for names of classes that entities cannot be read from."""
        loader = super().make_loader(data, split=split, **options)
        names = loader.facts.examples.classes.names
        if not _spell_entities(names):
            return loader
        if "" in names:
            raise ValueError('a class has an empty name, and others spell entities, such as B-...; name it, as in "O"')
        others = [name for name in names if name != "O" and not name.startswith(_ENTITIES)]
        if others and self.options.strict:
            raise ValueError(
                f'class "{others[0]}" is no tag of IOB2, which are O, B-... and I-...; leave out '
                "objective.options.strict, or rename it"
            )
        return loader

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        return class_cost(outputs, batch.labels, self.options)

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Predicted(batch.examples, outputs.argmax(1), batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        from sklearn import metrics

        kept = predicted.labels != IGNORED
        numbers, values, labels = (array[kept] for array in predicted)
        scores = {"accuracy": float(metrics.accuracy_score(labels, values))}
        names = np.array(examples.classes.names)
        if not _spell_entities(examples.classes.names):
            f1 = metrics.f1_score(labels, values, average="macro", labels=range(len(names)), zero_division=0)
            return scores | {"f1": float(f1)}
        borders = np.flatnonzero(np.diff(numbers)) + 1
        wanted, given = ([part.tolist() for part in np.split(names[tags], borders)] for tags in (labels, values))
        return scores | entity_scores(wanted, given, strict=self.options.strict)

    def constants(self, values: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
        yield np.array(most_frequent(labels))

    def prediction_rows(self, predicted: Predicted, examples: Words) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields lists of words and names of classes; None for words that were cut off or have no token."""
        names = np.array([*examples.classes.names, None], object)
        for number in range(len(examples)):
            words, kept = examples.words(number)
            begin, end = np.searchsorted(predicted.numbers, [number, number + 1])
            classes = np.full(len(words), -1)
            classes[kept] = predicted.values[begin:end]
            label = examples.cell("label", number)
            row = {"words": words, "predicted": names[classes].tolist()}
            yield number, {**row, "label": None if label in (None, "") else [name_of(one) for one in as_list(label)]}

    def example_batch(self, inputs: Tensor) -> Batch:
        batch = super().example_batch(inputs)
        batch.labels = torch.zeros(inputs.numel(), dtype=torch.long)
        batch.select = batch.examples = torch.arange(inputs.numel())
        return batch


def _spell_entities(names: Sequence[str]) -> bool:
    return any(name.startswith(_ENTITIES) for name in names)


def entity_scores(labels: list[list[str]], predicted: list[list[str]], *, strict: bool = False) -> dict[str, float]:
    """Returns F1, precision and recall by seqeval over all entities, 0 where there is none, of lists of tags."""
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support as by_conlleval
    from seqeval.metrics.v1 import precision_recall_fscore_support as by_scheme
    from seqeval.scheme import IOB2

    score = partial(by_scheme, scheme=IOB2) if strict else by_conlleval
    scores = score(labels, predicted, average="micro", zero_division=0)
    return dict(zip(("entity_precision", "entity_recall", "entity_f1"), map(float, scores[:3]), strict=True))
