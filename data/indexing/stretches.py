"""Reads files of tokens once: their documents, in stretches that are verified and shuffled together, by split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from matmix.data.formats.base import LARGEST_SHARD, Stretch
from matmix.data.indexing.base import Layout, Places, mapped
from matmix.data.manifest import SplitInfo
from matmix.data.prepare.base import HASHES, hash_of
from matmix.data.prepare.report import Report
from matmix.data.tokenizer import Tokenizer

STRETCH_BYTES = 64 << 20
"""Bytes of a stretch, unless its only document is longer: what is verified and shuffled together."""
# Tokens of a stretch that are decoded to count the bytes of its text; of longer stretches the rest is estimated.
_DECODED = 1 << 16


class _Piece(NamedTuple):
    """A stretch of a file with its documents."""

    shard: Stretch
    starts: np.ndarray
    """int64 (documents,): first byte of each in the file."""
    lengths: np.ndarray
    """int64 (documents,): tokens of each."""
    documents: list[np.ndarray]
    """The ids of each."""


@dataclass
class SplitOfFiles:
    """What was found of a split."""

    counts: np.ndarray
    """int64 (vocab_size,): how often each id occurs."""
    shards: list[Stretch] = field(default_factory=list)
    starts: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    decoded: int = 0
    """Tokens that were decoded, to so many bytes of text:"""
    decoded_bytes: int = 0

    @classmethod
    def empty(cls, vocab_size: int) -> SplitOfFiles:
        return cls(np.zeros(vocab_size, np.int64))

    def add(self, piece: _Piece, chosen: np.ndarray, tokenizer: Tokenizer) -> None:
        """Adds some documents of a piece. chosen: their numbers, int64 (n,)."""
        if not len(chosen):
            return
        starts, lengths = piece.starts[chosen], piece.lengths[chosen]
        self.shards.append(replace(piece.shard, documents=len(chosen), tokens=int(lengths.sum())))
        self.starts.append(starts)
        self.lengths.append(lengths)
        documents = [piece.documents[number] for number in chosen]
        self.counts += np.bincount(np.concatenate(documents), minlength=len(self.counts))
        left = _DECODED
        for document in documents:
            part = document[:left].tolist()
            self.decoded += len(part)
            self.decoded_bytes += len(tokenizer.decode(part).encode())
            left -= len(part)
            if not left:
                break

    def info(self) -> SplitInfo:
        tokens = sum(shard.tokens for shard in self.shards)
        return SplitInfo.of(self.shards, round(self.decoded_bytes * tokens / max(1, self.decoded)))


class Found(NamedTuple):
    """What files of tokens hold."""

    splits: dict[str, SplitOfFiles]
    documents: dict[str, int]
    """Documents of each file, by its path in the folder."""
    empty: int
    """Documents without tokens, which are left out."""
    dtype: np.dtype
    """Of the ids of all files."""


def read_files(
    root: Path,
    layout: Layout,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    names: Sequence[str],
    held_out: set[Path],
    fraction: float,
) -> Found:
    """Reads all files once. names: of the splits; held_out: files of the validation split alone; fraction: share of the
    documents of the others that goes there. Raises ValueError (one line) for files that are damaged or do not fit."""
    splits = {name: SplitOfFiles.empty(tokenizer.vocab_size) for name in names}
    sizes = {path: path.stat().st_size for path in paths}
    dtype, documents, empty, done, made = None, {}, 0, 0, 0
    with Report("indexing", sum(sizes.values())) as report:
        for path in paths:
            places = layout.places(path)
            dtype = places.dtype if dtype is None else dtype
            _check_dtype(path, places.dtype, paths[0], dtype, tokenizer)
            places, dropped = _without_ends(path, places, layout.end)
            empty += dropped
            documents[path.relative_to(root).as_posix()] = len(places.lengths)
            for piece in _pieces(root, path, places):
                _check_ids(path, piece, tokenizer)
                least = HASHES if path in held_out else int(fraction * HASHES)
                hashes = (hash_of(one) if 0 < least < HASHES else 0 for one in piece.documents)
                is_held_out = np.array([value < least for value in hashes])
                for name, split in splits.items():
                    split.add(piece, np.flatnonzero(is_held_out == (name == "validation")), tokenizer)
                made += piece.shard.tokens
                report.update(done + piece.shard.offset + piece.shard.bytes, made)
            done += sizes[path]
    return Found(splits, documents, empty, dtype)


def _check_dtype(path: Path, dtype: np.dtype, first: Path, wanted: np.dtype, tokenizer: Tokenizer) -> None:
    if dtype != wanted:
        raise ValueError(f"{path} holds {dtype.name}, and {first} {wanted.name}: index them in folders of their own")
    if tokenizer.vocab_size > 1 << 8 * dtype.itemsize:
        raise ValueError(
            f"{path} holds {dtype.name}, which has not the {tokenizer.vocab_size:,} ids of {tokenizer.path}: name the "
            "tokenizer that made the tokens"
        )


def _without_ends(path: Path, places: Places, end: int | None) -> tuple[Places, int]:
    """Returns the places without the end token of documents that have it, and without documents that are empty then;
    and how many those are."""
    lengths = places.lengths.copy()
    full = np.flatnonzero(lengths)
    if end is not None and len(full):
        item = places.dtype.itemsize
        lasts = places.starts[full] + (lengths[full] - 1) * item
        data, ids = np.frombuffer(mapped(path), np.uint8), np.zeros(len(full), np.int64)
        for byte in range(item):
            ids |= data[lasts + byte].astype(np.int64) << (8 * byte)
        lengths[full[ids == end]] -= 1
    kept = np.flatnonzero(lengths)
    if len(kept) and int(lengths.max()) * places.dtype.itemsize > LARGEST_SHARD:
        raise ValueError(f"{path}: a document of {int(lengths.max()):,} tokens is too long; cut it")
    return Places(dtype=places.dtype, starts=places.starts[kept], lengths=lengths[kept]), len(lengths) - len(kept)


def _pieces(root: Path, path: Path, places: Places) -> Iterator[_Piece]:
    """Yields the stretches of a file, each of whole documents."""
    data, at = mapped(path), 0
    ends = places.starts + places.lengths * places.dtype.itemsize
    while at < len(ends):
        begin = int(places.starts[at])
        stop = max(at + 1, int(ends.searchsorted(begin + STRETCH_BYTES, side="right")))
        starts, lengths = places.starts[at:stop], places.lengths[at:stop]
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        documents = [np.frombuffer(data, places.dtype, length, start) for start, length in pairs]
        raw = data[begin : int(ends[stop - 1])]
        size, digest = len(raw), hashlib.sha256(raw).hexdigest()
        shard = Stretch(
            file=path.relative_to(root).as_posix(),
            offset=begin,
            file_bytes=len(data),
            documents=len(documents),
            tokens=int(lengths.sum()),
            bytes=size,
            raw_bytes=size,
            sha256=digest,
            raw_sha256=digest,
        )
        yield _Piece(shard, starts, lengths, documents)
        at = stop


def _check_ids(path: Path, piece: _Piece, tokenizer: Tokenizer) -> None:
    ids = np.concatenate(piece.documents)
    bad = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if len(bad):
        number = int(np.cumsum(piece.lengths).searchsorted(bad[0], side="right"))
        raise ValueError(
            f"{path}: the document at byte {int(piece.starts[number]):,} holds the id {int(ids[bad[0]])}, outside of "
            f"the {tokenizer.vocab_size:,} ids of {tokenizer.path}: name the tokenizer that made the tokens, and the "
            "right --dtype where the file does not say it"
        )
