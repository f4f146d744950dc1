"""Writes documents into numbered shard files, in a way that can be stopped and continued."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.arrays import write_vector
from matmix.data.formats.base import LARGEST_SHARD, ShardFormat, ShardInfo
from matmix.data.manifest import SplitInfo
from matmix.data.storage.files import write_atomic

ZSTD_LEVEL = 3
_COUNTS = ("documents", "tokens", "text_bytes")


def write_indices(
    directory: Path, shard_format: ShardFormat, shards: Sequence[ShardInfo], lengths: Iterable[bytes]
) -> None:
    """Writes lengths.npy and index.json of a split. lengths: tokens of its documents as uint32, in pieces."""
    write_vector(directory / "lengths.npy", "<u4", sum(shard.documents for shard in shards), lengths)
    index = json.dumps(shard_format.index(list(shards)), sort_keys=True)
    write_atomic(directory / "index.json", index.encode())


@dataclass
class SplitWriter:
    """Writes the shards of one split. A shard is closed when the next document would make it larger than the format's
    limit, so the files depend on the sequence of documents only. `scratch` keeps their lengths until `finish`."""

    format: ShardFormat
    directory: Path
    scratch: Path
    shards: list[ShardInfo] = field(default_factory=list)
    pending: list[np.ndarray] = field(default_factory=list)
    pending_bytes: int = 0
    documents: int = 0
    """Documents written, the pending ones included."""
    tokens: int = 0
    text_bytes: int = 0

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.scratch.mkdir(parents=True, exist_ok=True)

    def write(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Adds a document (n,), n >= 1, and counts the bytes of the text or file that it was made of."""
        size = self.format.document_bytes(len(tokens))
        if self.format.shard_overhead + size > LARGEST_SHARD:
            raise ValueError(f"a document of {len(tokens):,} tokens fits into no shard; cut long documents")
        if self.pending and self.format.shard_overhead + self.pending_bytes + size > self.format.size_limit:
            self.flush()
        self.pending.append(tokens)
        self.pending_bytes += size
        self.documents += 1
        self.tokens += len(tokens)
        self.text_bytes += text_bytes

    def flush(self) -> None:
        """Writes the pending documents as a shard."""
        if not self.pending:
            return
        number = len(self.shards)
        name = self.format.packed_name(number)
        raw = data = self.format.encode(self.pending, self.documents - len(self.pending))
        if self.format.compression:
            import zstandard

            data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
        lengths = np.array([len(d) for d in self.pending], dtype=np.uint32)
        write_atomic(self.scratch / f"{number:08}.lengths", lengths.tobytes())
        write_atomic(self.directory / name, data)
        counts = {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}
        packed = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        unpacked = {"raw_bytes": len(raw), "raw_sha256": hashlib.sha256(raw).hexdigest()}
        self.shards.append(ShardInfo(file=name, **counts, **packed, **unpacked))
        self.pending, self.pending_bytes = [], 0

    def finish(self) -> SplitInfo:
        """Writes the last shard, lengths.npy and index.json; returns what the split holds."""
        self.flush()
        lengths = ((self.scratch / f"{number:08}.lengths").read_bytes() for number in range(len(self.shards)))
        write_indices(self.directory, self.format, self.shards, lengths)
        return SplitInfo.of(self.shards, self.text_bytes)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns what `restore` needs: a JSON object and arrays."""
        tokens = np.concatenate(self.pending) if self.pending else np.zeros(0, self.format.dtype)
        lengths = np.array([len(d) for d in self.pending], dtype=np.int64)
        facts = {"shards": [asdict(s) for s in self.shards], **{name: getattr(self, name) for name in _COUNTS}}
        return facts, {"tokens": tokens, "lengths": lengths}

    def restore(self, facts: dict[str, Any], tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Takes up a state."""
        self.shards = [ShardInfo(**shard) for shard in facts["shards"]]
        for shard in self.shards:
            shard.check("shard")
        self.documents, self.tokens, self.text_bytes = (facts[name] for name in _COUNTS)
        self.pending = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
        self.pending_bytes = sum(self.format.document_bytes(len(d)) for d in self.pending)

    def check(self) -> None:
        """Raises ValueError (one line) if a written shard is missing or has another size."""
        for number, shard in enumerate(self.shards):
            path = self.directory / shard.file
            lengths = self.scratch / f"{number:08}.lengths"
            whole = path.is_file() and path.stat().st_size == shard.bytes
            if not (whole and lengths.is_file() and lengths.stat().st_size == 4 * shard.documents):
                raise ValueError(
                    f"{path} is missing or damaged, the preparation cannot go on; "
                    f"delete {self.directory.parent} and prepare again"
                )
