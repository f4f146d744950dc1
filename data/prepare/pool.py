"""Chunks of the input to what is written of them (tokens, for example) in several processes, in the order of the
chunks."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from matmix.data.artifacts import panics_as_errors
from matmix.data.prepare.documents import Malformed, ReadOptions, documents_of
from matmix.data.prepare.sources import Chunk
from matmix.data.prepare.validation import in_validation
from matmix.data.processes import follow_parent
from matmix.data.tokenizer import Tokenizer

_Chunk = TypeVar("_Chunk")
_Result = TypeVar("_Result")

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


def tokenize(chunk: Chunk, tokenizer: Tokenizer, dtype: str, options: ReadOptions, fraction: float) -> Tokenized:
    """Turn a chunk into tokens. fraction: share of the documents that go to the validation split."""
    found = list(documents_of(chunk, options))
    malformed = [one for one in found if isinstance(one, Malformed)]
    texts = [one for one in found if isinstance(one, str) and one]
    # A normalising tokenizer may leave nothing of a document.
    encoded = zip(texts, tokenizer.encode_batch(texts), strict=True)
    kept = [(text.encode("utf-8"), tokens) for text, tokens in encoded if tokens]
    return Tokenized(
        tokens=np.fromiter((token for _, tokens in kept for token in tokens), dtype),
        lengths=np.fromiter((len(tokens) for _, tokens in kept), np.int64, len(kept)),
        text_bytes=np.fromiter((len(raw) for raw, _ in kept), np.int64, len(kept)),
        validation=np.fromiter((in_validation(raw, fraction) for raw, _ in kept), bool, len(kept)),
        records=sum(not isinstance(r, bytes) or bool(r.strip()) for r in chunk.records),
        malformed=len(malformed),
        examples=malformed[:_MOST_EXAMPLES],
        empty=len(found) - len(malformed) - len(kept),
    )


def tokenize_in_order(
    chunks: Iterable[Chunk], processes: int, worker: tuple[Path, str, ReadOptions, float]
) -> Iterator[tuple[Chunk, Tokenized]]:
    """Tokenise chunks, as `work_in_order` does.

    Args:
        worker: arguments of `tokenize` after the chunk, with the path of the tokenizer in its place.
    """
    return work_in_order(chunks, processes, functools.partial(_tokenizing, *worker), doing="tokenising")


def _tokenizing(path: Path, dtype: str, options: ReadOptions, fraction: float) -> Callable[[Chunk], Tokenized]:
    tokenizer = Tokenizer.load(path)
    return lambda chunk: tokenize(chunk, tokenizer, dtype, options, fraction)


def work_in_order(
    chunks: Iterable[_Chunk], processes: int, begin: Callable[[], Callable[[_Chunk], _Result]], *, doing: str
) -> Iterator[tuple[_Chunk, _Result]]:
    """Works on chunks; results come in the order of the chunks, with few chunks in flight.

    Args:
        begin: called once in each process (it can be pickled), gives what works on a chunk there.
        doing: what the processes are called in an error.

    Raises what reading and working raise, RuntimeError when a process was killed.
    """
    if processes == 1:
        work = begin()
        for chunk in chunks:
            yield chunk, work(chunk)
        return
    # Forking a process that runs threads (torch, tqdm, the tokenizers library) may lock up; spawning does
    # not.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(begin,))
    waiting: deque[tuple[_Chunk, Future[_Result]]] = deque()
    try:
        for chunk in chunks:
            with _without_interrupts():  # the first one starts the processes
                future = pool.submit(_work_on, chunk)
            waiting.append((chunk, future))
            if len(waiting) > 2 * processes + 1:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a {doing} process was killed (out of memory?); run the same command again to continue, "
            "perhaps with fewer processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that start here are not interrupted before they know what to do with it, nor is their start."""
    noted: list[int] = []
    handles = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number)) if handles else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit that
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handles:
            signal.signal(signal.SIGINT, handler)
    if noted:
        signal.raise_signal(signal.SIGINT)


_work: Callable[[Any], Any] | None = None


def _start(begin: Callable[[], Callable[[Any], Any]]) -> None:
    global _work
    # Ctrl-C goes to the whole process group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=follow_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with panics_as_errors():
        _work = begin()


def _work_on(chunk: Any) -> Any:
    assert _work is not None
    with panics_as_errors():
        return _work(chunk)
