"""The verbs that read texts, examples and pictures with a trained model: `matmix evaluate`, `embed` and `classify`."""

from __future__ import annotations

import dataclasses
import itertools
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import tyro
from tqdm import tqdm

from matmix.data.prepare.base import Malformed, read_chunks
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import decode, documents_of
from matmix.data.prepare.text.readers import find_sources
from matmix.train.arguments import RunFolder
from matmix.train.state import Weights

OF_TEXTS = ("text_field", "text_documents", "window", "stride", "carry_state")
OF_EXAMPLES = ("columns", "labels", "max_length")
"""Options of `matmix evaluate` that belong to one kind of what is scored."""


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
    """The unit of .txt files that is a document."""
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
    """Weights of a run: those that were trained, or with ema their average."""
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
        from matmix.launch.scores import check_files, say_examples, say_images, say_texts
        from matmix.use.opening import open_model
        from matmix.use.pictures import classifies_images, score_images
        from matmix.use.scoring import score_examples, score_texts, score_with_state, task_of

        files = {"out": self.out, "predictions": self.predictions, "confusion": self.confusion}
        check_files(**files)
        opened = open_model(self.source, step=self.step, weights=self.weights)
        if classifies_images(opened):
            self._refuse(("task", *OF_EXAMPLES, *OF_TEXTS), "classifies images")
            if len(self.texts) > 1:
                raise ValueError(f"{self.source}: give one dataset of pictures, or none for the run's own")
            say_images(score_images(opened, *self.texts, split=self.split), **files)
            return 0
        self._refuse(("split",), "is no image classifier")
        own = task_of(opened)
        if own and self.task not in ("", own):
            raise ValueError(f"{self.source} was fine-tuned for {own}")
        if own:
            self._refuse(OF_EXAMPLES, f"was fine-tuned for {own}, and knows its columns, classes and lengths")
        if own or self.task:
            self._refuse(OF_TEXTS, "is scored on labelled examples here")
            if len(self.texts) != 1:
                raise ValueError(f"{self.source}: give one file of examples")
            given = {"columns": self.columns, "labels": self.labels, "max_length": self.max_length}
            say_examples(score_examples(opened, self.texts[0], task="" if own else self.task, **given), **files)
            return 0
        self._refuse(
            (*OF_EXAMPLES, "predictions", "confusion"), "is scored on texts here: for labelled examples name --task"
        )
        if self.carry_state and (self.window or self.stride):
            raise ValueError("carried state has no windows: leave out --carry-state, or --window and --stride")
        # A model that does not beat a general compressor on the same text has learned little.
        xz, compressed = lzma.LZMACompressor(preset=9), []

        def compress(text: str) -> str:
            compressed.append(len(xz.compress(text.encode("utf-8"))))
            return text

        texts = filter(None, read_texts(self.texts, "scoring", self.text_field, self.text_documents))
        windows = {} if self.carry_state else {"window": self.window, "stride": self.stride}
        scoring = score_with_state if self.carry_state else score_texts
        score = scoring(opened, map(compress, texts), **windows)
        step = "" if opened.step is None else f", {opened.state}"
        xz_bits = 8 * (sum(compressed) + len(xz.flush())) / score.bytes
        say_texts(f"{opened.path}{step}", score, xz_bits, self.out)
        return 0

    def _refuse(self, options: Sequence[str], why: str) -> None:
        """Raises ValueError where one of these was given: `why` says what the source is."""
        for field in dataclasses.fields(self):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if field.name in options and getattr(self, field.name) != default:
                raise ValueError(f"{self.source} {why}; leave out --{field.name.replace('_', '-')}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed:
    """Write one vector for every text: row i is that of the i-th text of the files."""

    source: RunFolder
    """Run directory of an encoder, its URL, or an export."""
    texts: TextFiles
    out: Path
    """A .npy file, float32 (texts, d_model), or a .parquet file with the columns text and embedding."""
    text_field: str = "text"
    """Field of .jsonl objects, or column of .parquet files, that holds the text."""
    text_documents: TextDocuments = "line"
    """The unit of .txt files that is a text."""
    pooling: Literal["mean", "cls"] = "mean"
    """mean: over all tokens of a text, special ones included; cls: the features of the first token."""
    normalize: bool = False
    """Divide every vector by its length."""
    max_length: int = 0
    """Tokens of a text that are read, special ones included; 0 = as many as in training."""
    step: int | None = None
    """Checkpoint to use; default: the newest."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.use.embedding import Embedder, write_vectors
        from matmix.use.opening import open_model

        if self.out.suffix not in (".npy", ".parquet"):
            raise ValueError(f"--out {self.out}: name a file that ends in .npy or .parquet")
        if self.out.exists():
            raise ValueError(f"--out {self.out} exists; choose another file, or remove it")
        opened = open_model(self.source, step=self.step)
        embedder = Embedder(opened, pooling=self.pooling, max_length=self.max_length)
        texts = read_texts(self.texts, "embedding", self.text_field, self.text_documents)
        count = write_vectors(self.out, embedder, texts, normalize=self.normalize)
        print(f"{self.out}: {count:,} vectors of {embedder.width}, {self.pooling} of {opened.path}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classify:
    """Print the likeliest classes of pictures, by an image classifier."""

    source: RunFolder
    """Run directory, its URL, or an export."""
    images: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE")] = ()
    """Files of pictures: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM, of any size and mode."""
    top: int = 5
    """Classes to print for each picture."""
    step: int | None = None
    """Checkpoint of a run; default: the newest."""
    weights: Weights = "raw"
    """Weights of a run: those that were trained, or with ema their average."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.use.opening import open_model
        from matmix.use.pictures import classify

        if not self.images:
            raise ValueError("name the pictures: matmix classify RUN IMAGE ...")
        if self.top < 1:
            raise ValueError(f"--top must be 1 or more, got {self.top}")
        opened = open_model(self.source, step=self.step, weights=self.weights)
        likeliest = classify(opened, self.images, top=self.top)
        if missing := [name for name in self.images if not Path(name).exists()]:
            raise FileNotFoundError(f"there is no picture at {missing[0]}")
        print(f"{opened.where}: {len(opened.classes):,} classes")
        for name, classes in zip(self.images, likeliest, strict=True):
            print(name)
            for label, probability in classes:
                print(f"  {probability:6.1%}  {label}")
        return 0


_FILES = "Text as `matmix prepare` takes it: .txt, .jsonl (also .gz .xz .zst), .parquet, folders, globs."
TextFiles = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE", help=_FILES)]
TextDocuments = Literal["file", "paragraph", "line"]


def read_texts(
    files: Sequence[str], doing: str, text_field: str = "text", text_documents: TextDocuments = "line"
) -> Iterator[str]:
    """Yields every document of the files in order, "" for one of white space only; terminals show a progress bar, with
    the words `doing`. Raises ValueError and FileNotFoundError (one line) for files that cannot be read, and for records
    that hold no text."""
    if not files:
        raise ValueError("name the files with the text")
    sources, _ = find_sources(files, ReadOptions(text_field=text_field, text_documents=text_documents))
    before = [0, *itertools.accumulate(source.bytes for source in sources)]
    with tqdm(total=before[-1], desc=doing, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for chunk in read_chunks(sources):
            for text in documents_of(chunk):
                if isinstance(text, Malformed):
                    raise ValueError(f"{chunk.source.name}, line {text.line}: {text.reason}")
                yield text
            bar.update(before[chunk.start.source] + chunk.disk_bytes - bar.n)


def read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yields the lines of a stream of UTF-8, such as standard input. Raises ValueError (one line) at other bytes."""
    for number, line in enumerate(file, 1):
        text = decode(line, name, number).rstrip("\r\n")
        yield text.removeprefix("\ufeff") if number == 1 else text
