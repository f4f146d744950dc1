"""`matmix evaluate RUN FILE ...`: perplexity and bits per byte of a language model on any text, the scores of an
encoder on any labelled examples, or those of an image classifier on prepared pictures."""

from __future__ import annotations

import dataclasses
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matmix.launch.texts import TextDocuments, TextFiles, read_texts
from matmix.train.arguments import RunFolder
from matmix.train.state import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a language model on any text, an encoder on labelled examples, or an image classifier.

    For a run that was fine-tuned FILE is one file of examples with the columns of those that it was trained on; labels
    may be missing. For an export, and for an encoder that was only pretrained, --task names the task. These take --out,
    --predictions, --confusion, --step and --weights; the other options are those of language models.
    For a run on classes of images, and for an export of one, FILE is a dataset that matmix prepare-images made; without
    one it is that of the run. These take --split beside the same options.
    """

    source: RunFolder
    """Run directory, its URL, or an export."""
    texts: TextFiles = ()
    text_field: str = "text"
    """Field of .jsonl objects, or column of .parquet files, that holds the text."""
    text_documents: TextDocuments = "file"
    """What is a document in .txt files."""
    window: int = 0
    """Tokens that the model reads at a time; 0 = as many as in training."""
    stride: int = 0
    """Tokens by which the window moves on: each is predicted from at least window - stride others of its document, but
    for the first ones; 0 = half a window."""
    carry_state: bool = False
    """Predict each token from all before it in its document, by states that are carried along, not in windows."""
    step: int | None = None
    """Checkpoint to use; default: the newest."""
    weights: Weights = "raw"
    """Of a run: the weights that were trained, or with ema their average."""
    out: Path | None = None
    """Also write the numbers into this .json file."""
    task: str = ""
    """Labelled examples: task or recipe. A run that was fine-tuned knows its own."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """With --task: what the task reads, and the column that holds it, as in --columns text sentence label topic."""
    labels: tuple[str, ...] = ()
    """With --task: the classes in the order of the model's outputs; default: those that the export names."""
    max_length: int = 0
    """With --task: tokens of a text that are read; default: those of the recipe, 256."""
    predictions: Path | None = None
    """Labelled examples and images: also write a JSON object for each prediction into this .jsonl file."""
    confusion: Path | None = None
    """Labelled examples, one class for each, and images: also draw the confusion matrix into this .png file."""

    split: Literal["validation", "train", "test"] = "validation"
    """Images: which split of the dataset."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prints the scores and returns the exit code."""
        from matmix.launch.scores import say_examples, say_images, say_texts
        from matmix.use.examples import score_examples, task_of
        from matmix.use.opening import open_model
        from matmix.use.pictures import classifies_images, score_images
        from matmix.use.scoring import score_texts, score_with_state

        opened = open_model(self.source, step=self.step, weights=self.weights)
        files = {"out": self.out, "predictions": self.predictions, "confusion": self.confusion}
        if classifies_images(opened):
            if len(self.texts) > 1:
                raise ValueError(f"{self.source}: give one dataset of pictures, or none for the run's own")
            say_images(score_images(opened, *self.texts, split=self.split), **files)
            return 0
        given = {"columns": self.columns, "labels": self.labels, "max_length": self.max_length}
        own = task_of(opened)
        if own and (any(given.values()) or self.task not in ("", own)):
            raise ValueError(f"{self.source} was fine-tuned for {own}, and knows its columns, classes and lengths")
        if own or self.task:
            if len(self.texts) != 1:
                raise ValueError(f"{self.source}: give one file of examples")
            say_examples(score_examples(opened, self.texts[0], task="" if own else self.task, **given), **files)
            return 0
        if any(given.values()):
            raise ValueError("--columns, --labels and --max-length belong to --task: name the task")
        if self.predictions is not None or self.confusion is not None:
            raise ValueError("--predictions and --confusion are for labelled examples: name their task, --task")
        if self.carry_state and (self.window or self.stride):
            raise ValueError("carried state has no windows: leave out --carry-state, or --window and --stride")
        options = {"text_field": self.text_field, "text_documents": self.text_documents, "doing": "scoring"}
        xz = _Xz()
        texts = map(xz.add, filter(None, read_texts(self.texts, **options)))
        if self.carry_state:
            score = score_with_state(opened, texts)
        else:
            score = score_texts(opened, texts, window=self.window, stride=self.stride)
        step = "" if opened.step is None else f", {opened.state}"
        say_texts(f"{opened.path}{step}", score, xz.bits_per_byte, self.out)
        return 0


class _Xz:
    """Compresses the same text by a general compressor: a model that does not beat it has learned little."""

    def __init__(self) -> None:
        self._xz, self._read, self._written = lzma.LZMACompressor(preset=9), 0, 0

    def add(self, text: str) -> str:
        """Returns the text, which counts from here on."""
        raw = text.encode("utf-8")
        self._read += len(raw)
        self._written += len(self._xz.compress(raw))
        return text

    @property
    def bits_per_byte(self) -> float:
        """The size per byte of text; read once, at the end of all text."""
        self._written += len(self._xz.flush())
        return 8 * self._written / self._read
