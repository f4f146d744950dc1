"""Chunks to tokens in several processes, in the order of the chunks."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from matmix.data.parent_process import follow_parent
from matmix.data.prepare.documents import Malformed, ReadOptions, documents_of
from matmix.data.prepare.sources import Chunk
from matmix.data.tokenizer import Tokenizer

# A chunk of a file in which nothing can be read would send back more complaints than text.
_MOST_EXAMPLES = 100


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The documents of a chunk."""

    tokens: np.ndarray
    """All tokens, one document after the other (n,)."""
    lengths: np.ndarray
    """Tokens of each document (documents,) int64, all >= 1."""
    text_bytes: np.ndarray
    """UTF-8 bytes of each document (documents,) int64."""
    validation: np.ndarray
    """Which documents belong to the validation split (documents,) bool."""
    records: int
    """Records looked at (blank lines of .jsonl files are not)."""
    malformed: int
    examples: list[Malformed]
    """The first of the malformed records."""
    empty: int


class ChunkTokenizer:
    """Turns a chunk into tokens; made once in each process."""

    def __init__(self, tokenizer: Path, dtype: str, options: ReadOptions, validation_fraction: float) -> None:
        self.tokenizer = Tokenizer.load(tokenizer)
        self.dtype = dtype
        self.options = options
        self.threshold = int(validation_fraction * 2**64)

    def __call__(self, chunk: Chunk) -> Tokenized:
        texts: list[str] = []
        malformed: list[Malformed] = []
        empty = 0
        for found in documents_of(chunk, self.options):
            if isinstance(found, Malformed):
                malformed.append(found)
            elif found:
                texts.append(found)
            else:
                empty += 1
        ids = self.tokenizer.encode_batch(texts)
        # A normalising tokenizer may leave nothing of a document.
        kept = [i for i, tokens in enumerate(ids) if tokens]
        raw = [texts[i].encode("utf-8") for i in kept]
        return Tokenized(
            tokens=np.fromiter((t for i in kept for t in ids[i]), self.dtype),
            lengths=np.fromiter((len(ids[i]) for i in kept), np.int64, len(kept)),
            text_bytes=np.fromiter((len(r) for r in raw), np.int64, len(kept)),
            validation=np.fromiter((_hash(r) < self.threshold for r in raw), bool, len(kept)),
            records=sum(not isinstance(r, bytes) or bool(r.strip()) for r in chunk.records),
            malformed=len(malformed),
            examples=malformed[:_MOST_EXAMPLES],
            empty=empty + len(texts) - len(kept),
        )


def _hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def tokenize_in_order(
    chunks: Iterable[Chunk], processes: int, worker: tuple[Path, str, ReadOptions, float]
) -> Iterator[tuple[Chunk, Tokenized]]:
    """Tokenise chunks; results come in the order of the chunks, with few chunks in flight.

    Args:
        worker: arguments of `ChunkTokenizer`.

    Raises ValueError as reading does, RuntimeError when a process was killed.
    """
    if processes == 1:
        tokenize = ChunkTokenizer(*worker)
        for chunk in chunks:
            yield chunk, tokenize(chunk)
        return
    # Forking a process that runs threads (torch, tqdm, the tokenizers library) may lock up; spawning does
    # not.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(worker,))
    waiting: deque[tuple[Chunk, Future[Tokenized]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_tokenize, chunk)))
            if len(waiting) > 2 * processes + 1:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a tokenising process was killed (out of memory?); run the same command again to continue, "
            "perhaps with fewer processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: ChunkTokenizer | None = None


def _start(worker: tuple[Path, str, ReadOptions, float]) -> None:
    global _worker
    # Ctrl-C goes to the whole process group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = ChunkTokenizer(*worker)


def _tokenize(chunk: Chunk) -> Tokenized:
    assert _worker is not None
    return _worker(chunk)
