"""What a prepared dataset directory says about itself: ``manifest.json``.

The manifest is written last, by a rename, so a directory that has one is complete.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard file."""

    file: str
    """File name inside the split's folder, with the suffix of its compression."""
    documents: int
    tokens: int
    bytes: int
    """Size of the file as it lies on the disk."""
    sha256: str
    """Hex digest of the file as it lies on the disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitInfo:
    """One split: the sums over its shards, and the shards in order."""

    documents: int
    tokens: int
    bytes: int
    """UTF-8 bytes of the text (not of the shards)."""
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of ``manifest.json``."""

    version: int = MANIFEST_VERSION
    format: Literal["mds", "webdataset"]
    compression: Literal["zstd"] | None
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerInfo
    splits: dict[str, SplitInfo]
    token_histogram: str
    """File name of an int64 array (vocab_size,): how often each id occurs in the training split."""
    unigram_entropy: float
    """Entropy of that histogram in nats a token: the loss of a model that knows frequencies only."""
    sources: tuple[dict[str, Any], ...]
    """Per input file: path, bytes on disk, digest, documents."""
    malformed: dict[str, Any]
    """Records that could not be read: count, records looked at, first examples with file and line."""
    empty_documents: int
    """Documents without text, which were left out."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options that decide the contents; asking again with the same ones changes nothing."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Manifest:
        values = dict(raw)
        values["tokenizer"] = TokenizerInfo(**raw["tokenizer"])
        values["splits"] = {
            name: SplitInfo(**{**split, "shards": tuple(ShardInfo(**shard) for shard in split["shards"])})
            for name, split in raw["splits"].items()
        }
        values["sources"] = tuple(raw["sources"])
        return cls(**values)

    @classmethod
    def load(cls, directory: str | Path) -> Manifest:
        """Read the manifest of a prepared dataset.

        Raises FileNotFoundError where there is none, ValueError where it cannot be used.
        """
        path = Path(directory) / MANIFEST_NAME
        if not path.is_file():
            raise FileNotFoundError(
                f"{directory} holds no {MANIFEST_NAME}: it is no prepared dataset, or its preparation was "
                "stopped (run the same `matmix prepare` again to finish it)"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            version = raw["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); prepare the dataset again") from error
        if version != MANIFEST_VERSION:
            raise ValueError(
                f"{path} has version {version}, this matmix reads version {MANIFEST_VERSION}; prepare the dataset again"
            )
        try:
            return cls.from_dict(raw)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); prepare the dataset again") from error


def unigram_entropy(histogram: np.ndarray) -> float:
    """Entropy in nats of the distribution given by counts (vocab_size,)."""
    counts = histogram[histogram > 0].astype(np.float64)
    total = counts.sum()
    if total == 0:
        return 0.0
    return float(math.log(total) - (counts * np.log(counts)).sum() / total)
