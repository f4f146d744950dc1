"""Options of `matmix prepare`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from matmix.data.formats import FORMATS
from matmix.data.prepare.documents import ReadOptions
from matmix.data.storage.remote import refuse_secrets

# What `train_sentencepiece` is told of the tokenizer.
OF_TRAINING = ("vocab_size", "model_type", "byte_fallback", "character_coverage", "normalization")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig(ReadOptions):
    """Text files to shards of tokens."""

    inputs: tuple[str, ...]
    """Files (.txt; .jsonl, .ndjson or .json with one object a line; also .gz .xz .zst; .parquet), folders, globs, or
    bundled:shakespeare, bundled:moby_dick."""
    out: str
    """Folder or URL (s3://, ...) for the dataset. An unfinished one of the same options is continued, any other is
    left alone."""
    tokenizer: str = ""
    """An existing sentencepiece .model, tokenizer.json, or folder with one of them. Empty: train a
    sentencepiece model on the text."""
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

    format: str = "mds"
    """Kind of shards: mds (of mosaicml-streaming) or webdataset (tar files)."""
    compression: Literal["zstd", "none"] = "zstd"
    """Compression of the shards."""
    shard_megabytes: float = 64.0
    """Size of a shard before compression."""
    validation_fraction: float = 0.01
    """Share of the documents that go to the validation split. Which ones is decided by a hash of their text,
    so equal documents never stand on both sides. 0: no validation split."""

    max_malformed: float = 0.01
    """Share of the lines (or rows) that may be malformed: not JSON, without the text field, or not text."""
    part: str = ""
    """Prepare only this part of the input, such as 3/64 (counted from 1), under OUT/parts. Parts may be made at the
    same time on several machines that share a file system; `matmix prepare --merge --out OUT` then joins them."""
    tokenizer_only: bool = False
    """Only train the tokenizer that the parts of OUT will share. (Else the first part trains it, and others wait.)"""
    processes: int = 0
    """Tokenising processes; the result does not depend on it. 0: one for each core, as far as there is work.
    """

    def __post_init__(self) -> None:
        for name in ("inputs", "out", "tokenizer"):
            refuse_secrets(getattr(self, name), f"prepare: {name}")
        if not self.inputs:
            raise ValueError("prepare: no inputs are given; name files, folders or globs")
        if not self.out:
            raise ValueError("prepare: no output folder is given")
        for name, fine, allowed in (
            ("format", self.format in FORMATS, f"one of {', '.join(FORMATS)}"),
            ("max_document_chars", self.max_document_chars == 0 or self.max_document_chars >= 16, "0 or at least 16"),
            ("processes", self.processes >= 0, "at least 0"),
            ("vocab_size", self.vocab_size >= 1, "at least 1"),
            ("sample_megabytes", self.sample_megabytes > 0, "above 0"),
            ("shard_megabytes", 0 < self.shard_megabytes <= 4000, "above 0 and at most 4000"),
            ("max_line_megabytes", self.max_line_megabytes > 0, "above 0"),
            ("validation_fraction", 0 <= self.validation_fraction < 1, "in [0, 1)"),
            ("max_malformed", 0 <= self.max_malformed <= 1, "in [0, 1]"),
            ("character_coverage", 0 < self.character_coverage <= 1, "in (0, 1]"),
        ):
            if not fine:
                raise ValueError(f"prepare: {name} must be {allowed}, got {getattr(self, name)!r}")
        if self.text_documents == "separator" and not self.document_separator.strip():
            raise ValueError("prepare: document_separator is blank; for blank lines use text_documents=paragraph")

        if self.part and self.share is None:
            raise ValueError(
                f"prepare: part must be k/n with a k from 1 to n, such as 1/64 for the first of 64, got {self.part}"
            )
        if self.tokenizer_only and (self.part or self.tokenizer):
            raise ValueError("prepare: tokenizer_only trains the tokenizer of all parts: leave out part and tokenizer")

    @property
    def share(self) -> tuple[int, int] | None:
        """(k, n) of part k/n; None without one."""
        return read_share(self.part)

    def arguments(self) -> list[str]:
        """The command line of this preparation (of any of its parts), without --out and --part."""
        flags: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("inputs", "out", "part", "tokenizer_only") and value != field.default:
                flags += [f"--{field.name.replace('_', '-')}", str(value)]
        return [*self.inputs, *flags]


def read_share(part: str) -> tuple[int, int] | None:
    """(k, n) of k/n, such as 3/64; None where it is no such thing."""
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    k, n = map(int, found.groups()) if found else (0, 0)
    return (k, n) if 1 <= k <= n else None
