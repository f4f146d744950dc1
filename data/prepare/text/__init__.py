"""Options of `matmix prepare`: from text files to shards of tokens."""

import functools
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from matmix.data.config import Limits, at_least
from matmix.data.prepare.base import Preparation, PrepareOptions
from matmix.data.prepare.cleaning import CLEANING, CleanOptions
from matmix.data.storage.files import sha256_of

OF_TRAINING = ("vocab_size", "model_type", "byte_fallback", "character_coverage", "normalization")
"""Options that `train_sentencepiece` takes."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How records become documents."""

    text_field: str = "text"
    """Field of .jsonl objects, or column of .parquet, .arrow and MDS files, that holds the text; meta.text is the field
    text inside of meta. Of a sample in a .tar file: text is its member .txt, others are members or fields of .json."""
    template: str = ""
    """The text as several fields or columns with what stands between them, such as '{title}\\n\\n{text}': \\n is a line
    break, {{ and }} are braces. It replaces text_field."""
    text_documents: Literal["file", "paragraph", "line", "separator"] = "file"
    """What is a document in .txt files: the whole file, what stands between blank lines, a line, or what stands between
    lines that consist of the document separator."""
    document_separator: str = "<|endoftext|>"
    """The line between two documents of a .txt file, for --text-documents separator."""
    max_document_chars: int = 0
    """Cut longer documents into pieces of at most so many characters, between paragraphs, lines or words where
    possible; the pieces are documents of their own. 0: never."""
    intervals: str = ""
    """Of FASTA files, read only the intervals of this BED file: chromosome, start and end (from 0 on, end not included)
    in each line; further columns are not looked at."""
    raw_bytes: bool = False
    """Read every file, whatever its suffix, as bytes, cut by --max-document-chars; with --tokenizer bytes."""
    max_line_megabytes: float = 64.0
    """Longest line, paragraph or row that is read; a longer one is an error. It bounds the
    memory that a file can ask for, also a small compressed one."""

    @property
    def longest_line(self) -> int:
        """Bytes of the longest record."""
        return int(self.max_line_megabytes * (1 << 20))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that make a text. Raises ValueError for a template that names none."""
        return tuple(name for _, name in _pieces(self.template) if name) if self.template else (self.text_field,)

    def fill(self, texts: Sequence[str]) -> str:
        """Returns the template with the texts of `fields`."""
        given = iter(texts)
        return "".join(before + (next(given) if name else "") for before, name in _pieces(self.template))


@functools.cache
def _pieces(template: str) -> list[tuple[str, str]]:
    """Returns the pieces of a template: what stands before a field, and its name; "" after the last. Raises ValueError
    (one line)."""
    try:
        parsed = list(string.Formatter().parse(template))
        if not any(name for _, name, _, _ in parsed) or any(name == "" or spec or how for _, name, spec, how in parsed):
            raise ValueError("it takes names in braces")
    except ValueError as error:
        wanted = "such as '{title} {text}'"
        raise ValueError(f"prepare: template {template!r:.80} names no fields, {wanted} ({error})") from None
    return [(before.replace("\\n", "\n").replace("\\t", "\t"), name or "") for before, name, _, _ in parsed]


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(PrepareOptions, ReadOptions, CleanOptions):
    """Text files to shards of tokens."""

    verb: ClassVar[str] = "matmix prepare"
    without_effect: ClassVar[Sequence[str]] = (*PrepareOptions.without_effect, "tokenizer", "max_line_megabytes")

    tokenizer: str = ""
    """An existing sentencepiece .model, tokenizer.json, folder of a tokenizer (also of a fast or slow one of
    transformers) or its name at the Hugging Face hub (NAME or NAME@REVISION); or bytes (one id a byte), dna (A C G T N,
    whatever the case) or dna-cased (a c g t n apart). Empty: train a sentencepiece model on the text."""
    vocab_size: int = 8192
    """Number of ids of a trained tokenizer, with its 7 special tokens, the line break and the 256 bytes."""
    model_type: Literal["bpe", "unigram", "char"] = "bpe"
    """Kind of a trained tokenizer; char has one id a character, and vocab_size bounds their number."""
    byte_fallback: bool = True
    """Spell characters that the vocabulary lacks as bytes (else they become <unk>)."""
    character_coverage: float = 0.9995
    """Share of the characters of the sample that get an id of their own."""
    normalization: Literal["identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf"] = "identity"
    """What a trained tokenizer does to text first. Only identity gives back the same text; _cf folds case."""
    sample_megabytes: float = 64.0
    """How much text a tokenizer is trained on: the beginning of each file, by its share of all bytes."""
    max_malformed: float = 0.01
    """Share of the lines (or rows) that may be malformed: not JSON, without the text field, or not text."""

    def limits(self) -> Limits:
        return [
            *at_least(self, vocab_size=1),
            ("max_document_chars", self.max_document_chars == 0 or self.max_document_chars >= 16, "0 or at least 16"),
            ("sample_megabytes", self.sample_megabytes > 0, "above 0"),
            ("max_line_megabytes", self.max_line_megabytes > 0, "above 0"),
            ("max_malformed", 0 <= self.max_malformed <= 1, "in [0, 1]"),
            ("character_coverage", 0 < self.character_coverage <= 1, "in (0, 1]"),
            *self.clean_limits(),
            *super().limits(),
        ]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fields  # noqa: B018 - raises for a template that names none
        if self.text_documents == "separator" and not self.document_separator.strip():
            raise ValueError("prepare: document_separator is blank; for blank lines use text_documents=paragraph")
        trained = [
            name for name in (*OF_TRAINING, "sample_megabytes") if getattr(self, name) != getattr(PrepareConfig, name)
        ]
        if self.tokenizer and trained:
            raise ValueError(f"prepare: {trained[0]} is for a tokenizer that is trained, and --tokenizer names one")
        if self.raw_bytes and (self.tokenizer != "bytes" or self.intervals or self.cleans):
            raise ValueError("prepare: raw_bytes needs tokenizer=bytes, and neither intervals nor cleaning")

    def of_contents(self) -> dict[str, Any]:
        left_out = [*OF_TRAINING, "sample_megabytes"] if self.tokenizer else []
        left_out += ["text_field"] if self.template else ["template"]
        left_out += [*CLEANING, *(name for name in ("intervals", "raw_bytes") if not getattr(self, name))]
        values = {name: value for name, value in super().of_contents().items() if name not in left_out}
        if self.intervals:
            values["intervals"] = sha256_of(Path(self.intervals))
        return {**values, **self.clean_contents()}

    @classmethod
    def kind(cls) -> type[Preparation]:
        from matmix.data.prepare.text.preparation import TextPreparation

        return TextPreparation
