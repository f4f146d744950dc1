"""Reads and writes what a prepared dataset says about itself: ``manifest.json``, which is written last, so that a
directory that has one is complete. It has a digest of its own contents and those of the other small files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matmix.data.artifacts import artifact_name, fits, is_count, is_digest, one_line, parse_json, require
from matmix.data.formats import FORMATS, READ_ONLY
from matmix.data.formats.base import ShardInfo, Stretch
from matmix.data.formats.in_place import DTYPES

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
OTHER_DTYPES = ("uint16", "uint32", "int16", "int32", "int64", "float16", "float32", "float64")
"""Dtypes of documents that are neither text nor pictures (uint8 would be pictures)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """Which tokenizer made the shards."""

    kind: Literal["sentencepiece", "tokenizers"]
    file: str
    """Path of the copy, relative to the dataset directory."""
    sha256: str
    """Hex digest of that file."""
    vocab_size: int
    special: dict[str, int | None]
    """Ids of pad, unk, bos, eos, cls, sep and mask; None where the tokenizer has no such token."""
    round_trip: dict[str, int] | None = None
    """Of how many texts the tokens were turned back into text (`texts`), how many of them were then another text
    (`changed`), and how many hold what the vocabulary lacks (`unknown`); None: that was not done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitInfo:
    """One split: the sums over its shards, and the shards in order."""

    documents: int
    tokens: int
    bytes: int
    """UTF-8 bytes of the text (not of the shards)."""
    shards: tuple[ShardInfo, ...]

    @classmethod
    def of(cls, shards: Sequence[ShardInfo], text_bytes: int) -> SplitInfo:
        """Returns the sums over the shards that a preparation has written."""
        documents, tokens = (sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens"))
        return cls(documents=documents, tokens=tokens, bytes=text_bytes, shards=tuple(shards))


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesInfo:
    """The contents of a dataset of pictures."""

    classes: tuple[str, ...]
    """Names in the order of the labels."""
    counts: dict[str, tuple[int, ...]]
    """Split -> pictures of each class."""
    mean: tuple[float, ...]
    """Mean of the pixels of the training split, from 0 to 1: red, green, blue, and brightness (L)."""
    std: tuple[float, ...]
    """Their standard deviations."""
    width: tuple[int, float, int]
    """The smallest, the mean and the largest, of the training split."""
    height: tuple[int, float, int]
    background: int
    """Brightness, 0 to 255, that stands behind transparent pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of ``manifest.json``."""

    version: int = MANIFEST_VERSION
    format: str
    """Format of the shards: a name in `FORMATS` or `READ_ONLY`."""
    compression: Literal["zstd"] | None
    dtype: str
    """uint16 or uint32 of tokens, of those that others have written one of `DTYPES`, uint8 of pictures, one of
    `OTHER_DTYPES` of other documents."""
    tokenizer: TokenizerInfo | None = None
    """None where the documents are pictures, as are the next two."""
    splits: dict[str, SplitInfo]
    token_histogram: str | None = None
    """File name of an int64 array (vocab_size,): how often each id occurs in the training split."""
    unigram_entropy: float | None = None
    """Entropy of that histogram in nats a token: the loss of a model that knows frequencies only."""
    sources: tuple[dict[str, Any], ...]
    """Per input file: path, bytes on disk, digest, documents."""
    malformed: dict[str, Any]
    """Records that could not be read: count, records looked at, first examples with file and line."""
    empty_documents: int
    """Documents without text, which were left out."""
    images: ImagesInfo | None = None
    """None where the documents are text."""
    facts: dict[str, Any] | None = None
    """Facts about documents that are neither text nor pictures; None of those."""
    cleaning: dict[str, Any] | None = None
    """What cleaning did: documents (of the input), kept, removed (rule -> documents). None without it."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options that decide the contents; asking again with the same ones changes nothing."""
    files: dict[str, str] = field(default_factory=dict)
    """Hex digests of the small files (histogram, lengths, indices), by their paths."""
    folder: str | None = None
    """Absolute path of the folder with files that are read where they lie; None where they lie in the dataset."""

    def to_json(self) -> str:
        """Returns the text of the file, with a digest over all that it says."""
        values = asdict(self)
        for name in ("images", "facts", "cleaning", "folder"):
            if values[name] is None:
                del values[name]
        return json.dumps({**values, "digest": _digest(values)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Manifest:
        values = dict(raw)
        if (images := raw.get("images")) is not None:
            lists = {key: tuple(images[key]) for key in ("classes", "mean", "std", "width", "height")}
            counts = {split: tuple(numbers) for split, numbers in images["counts"].items()}
            values["images"] = ImagesInfo(**{**images, **lists, "counts": counts})
        elif raw.get("facts") is None:
            values["tokenizer"] = TokenizerInfo(**raw["tokenizer"])
        kind = Stretch if raw["format"] in READ_ONLY else ShardInfo
        values["splits"] = {
            name: SplitInfo(**{**split, "shards": tuple(kind(**shard) for shard in split["shards"])})
            for name, split in raw["splits"].items()
        }
        values["sources"] = tuple(raw["sources"])
        return cls(**values)

    @classmethod
    def parse(cls, raw: bytes, where: object) -> Manifest:
        """Returns the manifest in the bytes of its file; `where` names the dataset in errors. Raises ValueError (one
        line) for another version, for changed contents, and for what no preparation writes."""
        try:
            values = parse_json(raw, "its manifest.json")
            if not fits(values, {"version": object}):
                raise ValueError("its manifest.json has no version, it is damaged; prepare the data again")
        except ValueError as error:
            raise ValueError(f"{where} is not a prepared dataset: {error}") from None
        version = values["version"]
        if type(version) is not int or version != MANIFEST_VERSION:
            raise ValueError(
                f"{where}: its manifest has version {version!r:.40}, this matmix reads version {MANIFEST_VERSION}; "
                "prepare the data again or use the matmix it was made with"
            )
        digest = values.pop("digest", None)
        try:
            if digest != _digest(values):
                raise ValueError("it was changed after it was written: its digest is another")
            manifest = cls.from_dict(values)
            _check(manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = one_line(error)
            raise ValueError(f"{where}: its manifest.json is damaged ({why}); prepare the data again") from None
        return manifest

    @classmethod
    def load(cls, directory: str | Path) -> Manifest:
        """Returns the manifest of a dataset. Raises FileNotFoundError where there is none, ValueError as `parse`."""
        path = Path(directory) / MANIFEST_NAME
        if not path.is_file():
            raise FileNotFoundError(
                f"{directory} holds no {MANIFEST_NAME}: it is no prepared dataset, or its preparation was "
                "stopped (run the same `matmix prepare` again to finish it)"
            )
        return cls.parse(path.read_bytes(), directory)


def _digest(values: dict[str, Any]) -> str:
    """Returns a digest of what a manifest says, however it is laid out."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def unigram_entropy(histogram: np.ndarray) -> float:
    """Returns the entropy in nats of the distribution given by counts (vocab_size,)."""
    counts = histogram[histogram > 0].astype(np.float64)
    total = counts.sum()
    if total == 0:
        return 0.0
    return float(math.log(total) - (counts * np.log(counts)).sum() / total)


def _check(manifest: Manifest) -> None:
    """Raises ValueError or TypeError, each one line, for a manifest that no preparation writes."""
    tokenizer, images = manifest.tokenizer, manifest.images
    tokens = ("uint16", "uint32") if manifest.facts is None else OTHER_DTYPES
    if in_place := manifest.format in READ_ONLY:
        require(tokenizer is not None, "tokenizer", None)
        tokens = DTYPES
    for what, value, readable in (
        ("format", manifest.format, (*FORMATS, *READ_ONLY)),
        ("compression", manifest.compression, (None,) if in_place else ("zstd", None)),
        ("dtype", manifest.dtype, tokens if images is None else ("uint8",)),
        ("kind of tokenizer", "tokenizers" if tokenizer is None else tokenizer.kind, ("sentencepiece", "tokenizers")),
    ):
        if value not in readable:
            raise ValueError(f"it says {what} {value!r:.60}; readable are {', '.join(map(str, readable))}")
    if tokenizer is not None:
        artifact_name(tokenizer.file, "it", nested=True)
        _check_top_name(tokenizer.file.split("/")[0])
        require(is_digest(tokenizer.sha256), "tokenizer.sha256", tokenizer.sha256)
        limit, size = 1 << (16 if manifest.dtype == "uint16" else 31), tokenizer.vocab_size
        require(type(size) is int and 0 < size <= limit, "tokenizer.vocab_size", size)
        for name, value in tokenizer.special.items():
            require(value is None or (is_count(value) and value < size), f"tokenizer.special.{name}", value)
        met = tokenizer.round_trip
        form = dict.fromkeys(("texts", "changed", "unknown"), int)
        require(met is None or (fits(met, form) and len(met) == len(form)), "tokenizer.round_trip", met)
        artifact_name(manifest.token_histogram, "it")
        require(_is_number(manifest.unigram_entropy), "unigram_entropy", manifest.unigram_entropy)
    else:
        for name in ("token_histogram", "unigram_entropy"):
            require(getattr(manifest, name) is None, name, getattr(manifest, name))
    if images is not None:
        _check_images(manifest)
    require(manifest.facts is None or isinstance(manifest.facts, dict), "facts", manifest.facts)
    if (cleaning := manifest.cleaning) is not None:
        fine = fits(cleaning, {"documents": int, "kept": int, "removed": dict})
        rules = cleaning["removed"].items() if fine else ()
        fine = fine and all(one_line(rule) == rule and is_count(count) for rule, count in rules)
        require(fine, "cleaning", cleaning)
    require(is_count(manifest.empty_documents), "empty_documents", manifest.empty_documents)
    for source in manifest.sources:
        require(isinstance(source, dict) and is_count(source.get("documents", 0)), "sources", source)
    require(isinstance(manifest.options, dict), "options", manifest.options)
    if (folder := manifest.folder) is not None:
        fine = in_place and isinstance(folder, str) and folder.startswith("/") and one_line(folder) == folder
        require(fine, "folder", folder)
    malformed = manifest.malformed
    require(isinstance(malformed, dict), "malformed", malformed)
    for name in ("count", "records"):
        require(is_count(malformed.get(name, 0)), f"malformed.{name}", malformed.get(name))
    examples = malformed.get("examples", [])
    require(fits(examples, [{"file": str, "line": int, "reason": str}]), "malformed.examples", examples)
    for name, split in manifest.splits.items():
        _check_top_name(name)
        for shard in split.shards:
            shard.check(f"splits.{name}.shards")
        require(is_count(split.bytes), f"splits.{name}.bytes", split.bytes)
        for count in ("documents", "tokens"):
            if sum(getattr(shard, count) for shard in split.shards) != getattr(split, count):
                raise ValueError(f"the shards of split {name} do not add up to its {count}")
        for index in ("lengths.npy", "starts.npy") if in_place else ():
            require(f"{name}/{index}" in manifest.files, f"files.{name}/{index}", None)
    for name, digest in manifest.files.items():
        artifact_name(name, "it", nested=True)
        require(is_digest(digest), f"files.{name}", digest)


def _check_images(manifest: Manifest) -> None:
    images = manifest.images
    require(manifest.tokenizer is None, "tokenizer", manifest.tokenizer)
    classes = images.classes
    fine = 0 < len(classes) == len(set(classes)) and all(isinstance(c, str) and one_line(c) == c for c in classes)
    require(fine, "images.classes", classes)
    for split, counts in images.counts.items():
        documents = manifest.splits[split].documents
        fine = len(counts) == len(classes) and all(is_count(n) for n in counts) and sum(counts) == documents
        require(fine, f"images.counts.{split}", counts)
    for name in ("mean", "std", "width", "height"):
        numbers, length = getattr(images, name), 4 if name in ("mean", "std") else 3
        require(len(numbers) == length and all(_is_number(n) for n in numbers), f"images.{name}", numbers)
    require(is_count(images.background) and images.background <= 255, "images.background", images.background)


def _check_top_name(name: str) -> None:
    artifact_name(name, "it")
    # Those are our own: the cache, an unfinished preparation.
    require(not name.startswith("."), "a folder's name", name)


def _is_number(value: object) -> bool:
    return is_count(value) or (type(value) is float and math.isfinite(value) and value >= 0)
