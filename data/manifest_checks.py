"""What must be true of a manifest, whoever wrote it: names that stay in the dataset, counts, digests, known kinds."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from matmix.data.artifacts import artifact_name

if TYPE_CHECKING:
    from matmix.data.formats.writers import Shard
    from matmix.data.manifest import Manifest, ShardInfo

LARGEST_SHARD = (1 << 32) - 1
"""Bytes of a shard without compression: offsets inside an MDS shard are 32-bit, and no format is given more."""
_LARGEST_COUNT = 1 << 62
_HEX = re.compile(r"[0-9a-f]{64}")
_WHERE = "it"

# Bytes beside the tokens, at most: of a document (headers of the tar member with its long name, and of the array;
# offset and size in MDS), and of a shard (the end of a tar file, the configuration in MDS).
_DOCUMENT_OVERHEAD = 4096
_SHARD_OVERHEAD = 1 << 20


def check_manifest(manifest: Manifest) -> None:
    """Raises ValueError or TypeError, each one line, for a manifest that no preparation writes."""
    for what, value, readable in (
        ("format", manifest.format, ("mds", "webdataset")),
        ("compression", manifest.compression, ("zstd", None)),
        ("dtype", manifest.dtype, ("uint16", "uint32")),
        ("kind of tokenizer", manifest.tokenizer.kind, ("sentencepiece", "tokenizers")),
    ):
        if value not in readable:
            names = ", ".join(str(name) for name in readable)
            raise ValueError(f"it says {what} {value!r:.60}; readable are {names}")
    _check_tokenizer(manifest)
    artifact_name(manifest.token_histogram, _WHERE)
    _require(_is_entropy(manifest.unigram_entropy), "unigram_entropy", manifest.unigram_entropy)
    _require(_is_count(manifest.empty_documents), "empty_documents", manifest.empty_documents)
    for source in manifest.sources:
        fine = isinstance(source, dict) and _is_count(source.get("documents", 0))
        _require(fine, "sources", source)
    _require(isinstance(manifest.options, dict), "options", manifest.options)
    _check_malformed(manifest.malformed)
    for name, split in manifest.splits.items():
        _check_top_name(name)
        for shard in split.shards:
            check_shard(shard, f"splits.{name}.shards")
        _require(_is_count(split.bytes), f"splits.{name}.bytes", split.bytes)
        for count in ("documents", "tokens"):
            if sum(getattr(shard, count) for shard in split.shards) != getattr(split, count):
                raise ValueError(f"the shards of split {name} do not add up to its {count}")
    for name, digest in manifest.files.items():
        artifact_name(name, _WHERE, nested=True)
        _require(_is_digest(digest), f"files.{name}", digest)


def largest_raw_size(shard: ShardInfo, dtype: str) -> int:
    """Bytes that a shard can have without compression, as its documents and tokens have it."""
    size = shard.tokens * (2 if dtype == "uint16" else 4) + shard.documents * _DOCUMENT_OVERHEAD + _SHARD_OVERHEAD
    return min(size, LARGEST_SHARD)


def _check_tokenizer(manifest: Manifest) -> None:
    tokenizer = manifest.tokenizer
    artifact_name(tokenizer.file, _WHERE, nested=True)
    _check_top_name(tokenizer.file.split("/")[0])
    _require(_is_digest(tokenizer.sha256), "tokenizer.sha256", tokenizer.sha256)
    limit = 1 << (16 if manifest.dtype == "uint16" else 31)
    size = tokenizer.vocab_size
    _require(type(size) is int and 0 < size <= limit, "tokenizer.vocab_size", size)
    for name, value in tokenizer.special.items():
        _require(value is None or (type(value) is int and 0 <= value < size), f"tokenizer.special.{name}", value)


def check_shard(shard: ShardInfo | Shard, where: str) -> None:
    """Raises ValueError for a shard that no preparation writes. where: what to call it."""
    artifact_name(shard.file, _WHERE)
    for name in ("documents", "tokens", "bytes"):
        _require(_is_count(getattr(shard, name)), f"{where}.{name}", getattr(shard, name))
    _require(_is_digest(shard.sha256), f"{where}.sha256", shard.sha256)
    raw_size, raw_digest = shard.raw_bytes, shard.raw_sha256
    _require(raw_size is None or (_is_count(raw_size) and raw_size <= LARGEST_SHARD), f"{where}.raw_bytes", raw_size)
    _require(raw_digest is None or _is_digest(raw_digest), f"{where}.raw_sha256", raw_digest)


def _check_malformed(malformed: Any) -> None:
    _require(isinstance(malformed, dict), "malformed", malformed)
    for name in ("count", "records"):
        _require(_is_count(malformed.get(name, 0)), f"malformed.{name}", malformed.get(name))
    examples = malformed.get("examples", [])
    kinds = {"file": str, "line": int, "reason": str}
    fine = isinstance(examples, list) and all(
        isinstance(e, dict) and all(isinstance(e.get(key), kind) for key, kind in kinds.items()) for e in examples
    )
    _require(fine, "malformed.examples", examples)


def _check_top_name(name: str) -> None:
    artifact_name(name, _WHERE)
    # Those are our own: the cache, an unfinished preparation.
    _require(not name.startswith("."), "a folder's name", name)


def _require(fine: bool, name: str, value: object) -> None:
    if not fine:
        raise ValueError(f"{ascii(name)[1:-1]:.100} cannot be {ascii(value)[:60]}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _is_entropy(value: object) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value) and value >= 0)
