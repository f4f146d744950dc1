"""`matmix evaluate RUN FILE ...`: perplexity and bits per byte of a language model on any text, the scores of an
encoder on any labelled examples, or those of an image classifier on prepared pictures."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matmix.data.storage.files import write_atomic
from matmix.launch.examples import Judge, judge, judge_of_run, judge_of_task, say, task_of
from matmix.launch.images.scores import classifies_images, say_images, score_images
from matmix.launch.loading import Source, load_source
from matmix.launch.scoring import Score, score_texts, score_with_state
from matmix.launch.texts import TextDocuments, TextFiles, read_texts
from matmix.train.arguments import RunFolder
from matmix.train.engine.full_state import Weights


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
        """Prints the scores; the exit code."""
        files = {"out": self.out, "predictions": self.predictions, "confusion": self.confusion}
        if classifies_images(self.source):
            if len(self.texts) > 1:
                raise ValueError(f"{self.source}: give one dataset of pictures, or none for the run's own")
            options = {"split": self.split, "step": self.step, "weights": self.weights}
            say_images(score_images(self.source, *self.texts, **options), **files)
            return 0
        if by := self._judge():
            if len(self.texts) != 1:
                raise ValueError(f"{self.source}: give one file of examples")
            judged = judge(by, self.texts[0])
            say(judged, **files)
            return 0
        if self.predictions is not None or self.confusion is not None:
            raise ValueError("--predictions and --confusion are for labelled examples: name their task, --task")
        if self.carry_state and (self.window or self.stride):
            raise ValueError("carried state has no windows: leave out --carry-state, or --window and --stride")
        source = load_source(self.source, step=self.step, weights=self.weights)
        config = source.model.config
        if not config.causal:
            raise ValueError(
                f"{source.path} is an {config.architecture}, which gives no text a probability: name a task on "
                "labelled examples, --task"
            )
        options = {"text_field": self.text_field, "text_documents": self.text_documents, "doing": "scoring"}
        xz = _Xz()
        texts = map(xz.seen, filter(None, read_texts(self.texts, **options)))
        if self.carry_state:
            score, how = score_with_state(source, texts), "state carried through each document"
        else:
            window = self.window or source.seqlen
            stride = self.stride or max(1, window // 2)
            config.check_seqlen(window)
            if not 1 <= stride <= window:
                raise ValueError(f"--stride must lie between 1 and the window of {window} tokens, got {stride}")
            score = score_texts(source, texts, window=window, stride=stride)
            how = f"windows of {window:,} tokens, moved by {stride:,}"
        self._say(source, score, how, xz.bits_per_byte)
        return 0

    def _judge(self) -> Judge | None:
        """What scores labelled examples; None for a language model's texts."""
        given = self.columns or self.labels or self.max_length
        own = task_of(self.source)
        if own:
            if given or self.task not in ("", own):
                raise ValueError(f"{self.source} was fine-tuned for {own}, and knows its columns, classes and lengths")
            return judge_of_run(self.source, step=self.step, weights=self.weights)
        if not self.task:
            if given:
                raise ValueError("--columns, --labels and --max-length belong to --task: name the task")
            return None
        options = {"columns": self.columns, "labels": self.labels, "max_length": self.max_length, "step": self.step}
        return judge_of_task(self.source, self.task, weights=self.weights, **options)

    def _say(self, source: Source, score: Score, how: str, xz: float) -> None:
        where = f"{source.path}" + ("" if source.step is None else f", step {source.step:,}")
        print(f"{where}: {score.texts:,} documents, {score.tokens:,} tokens, {score.bytes:,} bytes; {how}")
        rows = {
            "loss": (score.nats / score.tokens, "nats per token"),
            "perplexity": (score.perplexity, "per token"),
            "word_perplexity": (score.word_perplexity, "per word (what stands between white space)"),
            "bits_per_byte": (score.bits_per_byte, "bits per byte"),
            "xz_bits_per_byte": (xz, "bits per byte by `xz -9` of the same text, for comparison"),
        }
        for name, (value, unit) in rows.items():
            print(f"  {name.replace('_', ' '):<18}{value:>12.4f}  {unit}")
        if self.out is not None:
            numbers = {name: value for name, (value, _) in rows.items()}
            counts = {"documents": score.texts, "tokens": score.tokens, "bytes": score.bytes, "words": score.words}
            write_atomic(self.out, json.dumps({**numbers, **counts, "method": how}, indent=2) + "\n")


class _Xz:
    """What a general compressor makes of the same text: a model that does not beat it has learned little."""

    def __init__(self) -> None:
        self._xz, self._read, self._written = lzma.LZMACompressor(preset=9), 0, 0

    def seen(self, text: str) -> str:
        """The text, which counts from here on."""
        raw = text.encode("utf-8")
        self._read += len(raw)
        self._written += len(self._xz.compress(raw))
        return text

    @property
    def bits_per_byte(self) -> float:
        """At the end of all text."""
        self._written += len(self._xz.flush())
        return 8 * self._written / self._read
