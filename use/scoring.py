"""Scores models: texts by their likelihood under a language model, and an encoder on labelled examples."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.model.interop.export.generation_state import advance
from matmix.train.config import RunConfig
from matmix.train.evaluators.validation import in_order
from matmix.train.init.start import load_start
from matmix.train.tasks.base import Predicted, Task
from matmix.train.tasks.cross_entropy import row_cross_entropy
from matmix.train.tasks.finetuning.base import ExampleTask, with_labels
from matmix.train.tasks.metrics import as_controls
from matmix.use.finetuning import judging_config
from matmix.use.opening import TrainedModel

_PACK = 1 << 14  # tokens in one forward pass
_CARRIED = 512  # tokens in one step of carried state, of all of which there are logits


@dataclasses.dataclass(slots=True)
class Score:
    """Sums over texts, and the measures that they give."""

    nats: float = 0.0
    """Negative log-likelihood of the tokens that are predicted."""
    tokens: int = 0
    """Number of tokens that are predicted."""
    bytes: int = 0
    """UTF-8 bytes of their text."""
    words: int = 0
    """Words, separated by white space."""
    texts: int = 0
    method: str = ""
    """How they were read, for people."""

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss per token."""
        return math.exp(min(self.nats / self.tokens, 700.0))

    @property
    def word_perplexity(self) -> float:
        return math.exp(min(self.nats / max(self.words, 1), 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def windows_of(ids: Sequence[int], window: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yields the windows in which the tokens after the first are predicted, each once: consecutive tokens, and the
    number of those at the end that are predicted in this window.

    A model reads all tokens of a window but the last, `window` of them at most. The first window predicts all that it
    reads; each other one the next `stride` tokens, for which it reads the `window` tokens before the last of them.
    """
    begin, count = 0, len(ids) - 1
    while begin < count:
        end = min(count, begin + (stride if begin else window))
        yield ids[max(0, end - window) : end + 1], end - begin
        begin = end


@torch.inference_mode()
def score_texts(opened: TrainedModel, texts: Iterable[str], *, window: int = 0, stride: int = 0) -> Score:
    """Scores each text in windows as `windows_of` cuts them, many in one forward pass as packed documents. A text
    begins as documents began in training; without a token that starts documents, its first token is not predicted.

    window: tokens that the model reads at a time, 0 = as many as in training; stride: tokens by which it moves on, 0 =
    half a window. Raises ValueError (one line) for a model that is no language model, sizes that it cannot have, and
    texts without a token to predict.
    """
    window = window or opened.seqlen
    stride = stride or max(1, window // 2)
    opened.config.check_seqlen(window)
    if not 1 <= stride <= window:
        raise ValueError(f"--stride must lie between 1 and the window of {window} tokens, got {stride}")
    score, waiting = Score(method=f"windows of {window:,} tokens, moved by {stride:,}"), []
    windows = (windows_of(ids, window, stride) for ids in _encoded(opened, texts, score))
    for tokens, predicted in itertools.chain.from_iterable(windows):
        waiting.append((tokens, predicted))
        if sum(len(tokens) for tokens, _ in waiting) >= _PACK:
            score.nats += _packed_nats(opened, waiting)
            waiting.clear()
    if waiting:
        score.nats += _packed_nats(opened, waiting)
    return score


def _packed_nats(opened: TrainedModel, windows: Sequence[tuple[Sequence[int], int]]) -> float:
    read = opened.packed([tokens[:-1] for tokens, _ in windows])
    targets = [token for tokens, predicted in windows for token in tokens[-predicted:]]
    ends = zip(read["cu_seqlens"][1:].tolist(), windows, strict=True)
    places = [place for end, (_, predicted) in ends for place in range(end - predicted, end)]
    select, targets = (torch.tensor(values, device=opened.device) for values in (places, targets))
    losses, _ = opened.model(**read, select=select, readout=partial(row_cross_entropy, targets=targets))
    return losses.double().sum().item()


@torch.inference_mode()
def score_with_state(opened: TrainedModel, texts: Iterable[str]) -> Score:
    """Scores as `score_texts` does, but predicts each token from all before it, by states that are carried along."""
    score = Score(method="state carried through each document")
    for ids in _encoded(opened, texts, score):
        state, row = opened.model.initial_state(1), torch.tensor([ids], device=opened.device)
        for begin in range(0, len(ids) - 1, _CARRIED):
            read = row[:, begin : min(begin + _CARRIED, len(ids) - 1)]
            try:
                logits, state = advance(opened.model, read, state, slice(None))
            except OverflowError as error:  # of layers that remember so many tokens only
                raise ValueError(f"{error}; score the text in windows, without carried state") from None
            targets = row[0, begin + 1 : begin + 1 + read.shape[1]]
            score.nats += F.cross_entropy(logits[0].float(), targets, reduction="none").double().sum().item()
    return score


def _encoded(opened: TrainedModel, texts: Iterable[str], score: Score) -> Iterator[list[int]]:
    """Yields the tokens of each text with the one that it starts from, and counts them in `score`. Raises ValueError
    (one line) for a model that gives no probabilities, and where no token is predicted."""
    if not opened.config.causal or opened.config.model_class.separated:
        raise ValueError(
            f"{opened.path} is an {opened.config.architecture}, which gives no text a probability: name a task on "
            "labelled examples, --task"
        )
    for text in texts:
        ids = opened.reader.tokenizer.encode(text)
        ids = ids if opened.reader.start is None else [opened.reader.start, *ids]
        score.texts += 1
        score.bytes += len(text.encode("utf-8"))
        score.words += len(text.split())
        score.tokens += max(0, len(ids) - 1)
        yield ids
    if not score.tokens:
        raise ValueError("there is no text to score: every document is empty, or a single token that nothing precedes")


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
        """Yields a JSON object for each example: its number in the file, from 0 on, its row, and the prediction."""
        for number, shown in self.task.prediction_rows(self.predicted, self.examples):
            yield {"example": number, "row": self.examples.rows.lines[number], **shown}


def one_pass(task: Task, data: DataConfig, split: str, seed: int, batch: int) -> Any:
    """Returns the loader that reads all of a split once, in this process."""
    sizes = {"global_batch_size": batch, "micro_batch_size": batch, "one_pass": True}
    return task.make_loader(dataclasses.replace(data, workers=0), split=split, seed=seed, **sizes)


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

    task: a task or a recipe; "" for a run that was fine-tuned, which knows its task, columns, classes and lengths.
    columns, labels, max_length: in place of data.examples.columns, .labels and data.seqlen of the recipe; the names of
    an export's classes come before those of a recipe. Raises FileNotFoundError or ValueError (one line).
    """
    config, model = _fitting(opened, task, columns or {}, labels, max_length) if task else _fine_tuned(opened)
    kind, files = config.task(), dataclasses.replace(config.data.examples, test=file)
    loader = one_pass(kind, dataclasses.replace(config.data, examples=files), "test", config.seed, _BATCH)
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
    data = opened.run.config.data
    examples = dataclasses.replace(data.examples, tokenizer=str(opened.reader.tokenizer.path))
    return dataclasses.replace(opened.run.config, data=dataclasses.replace(data, examples=examples)), opened.model


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
