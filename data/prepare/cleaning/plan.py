"""Cleans an input: all of it is looked at to decide which documents are left out, before any shard is written.

    OUT/cleaning/removed.npy    int64 (3 n,), ascending: number of the source, offset of the record, document in it
    OUT/cleaning/report.json    how many documents each rule removed, and the first five of them

Whoever makes shards reads the input through a `Cleaner`, which passes over those documents. In parts, each looks at its
own share, and one of them decides on what all have found: what is left does not depend on the number of parts or
processes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.artifacts import fits, is_count, one_line, parse_json
from matmix.data.prepare.base import Chunk, Malformed, Position, Source
from matmix.data.prepare.cleaning import CleanOptions
from matmix.data.prepare.cleaning.duplicates import (
    BANDS,
    ROWS,
    Stacked,
    check_minhash,
    first_equal,
    first_similar,
    signature,
)
from matmix.data.prepare.cleaning.evaluations import Evaluation, Runs, is_contaminated, read_evaluations
from matmix.data.prepare.cleaning.findings import Examined, Findings, Place, lines_before
from matmix.data.prepare.cleaning.rules import (
    broken_rule_of_c4,
    broken_rule_of_gopher,
    check_languages,
    language_of,
    sentences_of_c4,
)
from matmix.data.prepare.cleaning.words import hashed_words
from matmix.data.prepare.pool import work_in_order
from matmix.data.prepare.report import Report
from matmix.data.prepare.workspace import locked
from matmix.data.processes import cores

logger = logging.getLogger(__name__)

FOLDER = "cleaning"
REMOVED_NAME, REPORT_NAME = f"{FOLDER}/removed.npy", f"{FOLDER}/report.json"
# Seconds between two saved states, more where saving would take more than the given share of the time.
SAVE_SECONDS = 5.0
SAVE_SHARE = 0.05
_EXAMPLES = 5
_SHOWN_CHARACTERS = 100
_REPORT = {"documents": int, "kept": int, "removed": dict}


class _Placed(NamedTuple):
    """What `documents_of` gave for a record."""

    place: Place
    text: str | Malformed
    is_blank: bool


@dataclass(frozen=True)
class Cleaner:
    """Reads the documents of chunks that are not left out. removed: int64 (n, 3), ascending."""

    documents_of: Callable[[Chunk], Iterator[str | Malformed]]
    options: CleanOptions
    removed: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64), repr=False)

    def __call__(self, chunk: Chunk) -> Iterator[str | Malformed]:
        """Yields the documents, "" for one of white space only. Raises as `documents_of`."""
        if not self.options.cleans:
            yield from self.documents_of(chunk)
            return
        low, high = np.searchsorted(self.removed[:, 0], [chunk.start.source, chunk.start.source + 1])
        here = self.removed[low:high, 1:]
        low, high = np.searchsorted(here[:, 0], [chunk.start.offset, chunk.end.offset])
        gone = set(map(tuple, here[low:high].tolist()))
        for one in self.placed(chunk):
            if one.place[1:3] not in gone:
                yield one.text

    def placed(self, chunk: Chunk) -> Iterator[_Placed]:
        """Yields every document with its place, which does not depend on the chunk that it came in."""
        records, end = chunk.records, chunk.end.offset
        # Offsets count rows, or bytes of records that are joined without a gap up to the end of the chunk.
        are_rows = end - chunk.start.offset == len(records)
        assert are_rows or all(isinstance(record, bytes) for record in records)
        sizes = [1 if are_rows else len(record) for record in records]
        at = replace(chunk.start, offset=end - sum(sizes))
        for record, size in zip(records, sizes, strict=True):
            for number, text in enumerate(self.documents_of(replace(chunk, start=at, records=[record]))):
                is_blank = isinstance(text, Malformed) or not text
                if "c4" in self.options.quality and not is_blank:
                    text = sentences_of_c4(text)
                yield _Placed((at.source, at.offset, number, at.line), text, is_blank)
            lines = record.count(b"\n") if isinstance(record, bytes) else 1
            at = Position(at.source, at.offset + size, at.line + lines)


def is_decided(folder: Path) -> bool:
    """Returns whether a folder says what is left out."""
    return all((folder / name).is_file() for name in (REMOVED_NAME, REPORT_NAME))


def decided(cleaner: Cleaner, folder: Path, look: Look | None) -> tuple[Cleaner, dict[str, bytes]]:
    """Returns the cleaner that knows what is left out, and the files of this in a dataset. folder: has them, or else
    `look` has ended. Raises ValueError (one line) where nothing is left."""
    if look is None or is_decided(folder):
        files = {name: (folder / name).read_bytes() for name in (REMOVED_NAME, REPORT_NAME)}
        return replace(cleaner, removed=read_removed(folder)), files
    removed, report = look.decide()
    if report["documents"] and not report["kept"]:
        raise ValueError(f"cleaning leaves none of the {report['documents']:,} documents: {in_words(report)}")
    buffer = io.BytesIO()
    np.save(buffer, removed.reshape(-1))
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    return replace(cleaner, removed=removed), {REMOVED_NAME: buffer.getvalue(), REPORT_NAME: text.encode()}


def read_removed(folder: Path) -> np.ndarray:
    """Returns the places of the removed documents, int64 (n, 3). Raises ValueError (one line) for a damaged file."""
    path = folder / REMOVED_NAME
    flat = read_vector(path, "int64", path)
    if len(flat) % 3:
        raise ValueError(f"{path} is damaged: it holds no threes of numbers")
    return flat.reshape(-1, 3)


def read_report(folder: Path) -> dict[str, Any] | None:
    """Returns the counts in the report: documents, kept, removed; None where nothing was cleaned. Raises ValueError
    (one line) for a damaged file."""
    path = folder / REPORT_NAME
    if not path.is_file():
        return None
    report = parse_json(path.read_bytes(), path)
    counts = {name: report.get(name) for name in _REPORT} if isinstance(report, dict) else None
    rules = counts["removed"].items() if fits(counts, _REPORT) else [("", None)]
    if not all(one_line(rule) == rule and is_count(count) for rule, count in rules):
        raise ValueError(f"{path} is damaged: its counts are no numbers")
    return counts


def in_words(report: dict[str, Any]) -> str:
    """Returns the counts of a report as words."""
    return ", ".join(f"{count:,} {rule}" for rule, count in report["removed"].items()) or "nothing to leave out"


class Look:
    """A look at all documents of an input, in shares that processes on machines which see the same folder do by turns,
    and the decision that follows."""

    def __init__(
        self,
        cleaner: Cleaner,
        sources: Sequence[Source],
        chunks: Callable[[Position, Position, Position], Iterator[Chunk]],
        evaluations: Mapping[str, Sequence[Evaluation]],
        processes: int,
    ) -> None:
        """chunks: `Preparation.chunks`. evaluations: of `read_evaluations`. processes: 0 for one a core, as far as
        there is work. Raises ValueError (one line) for options that cannot be met."""
        self._cleaner, self._sources, self._chunks, self._processes = cleaner, sources, chunks, processes
        if cleaner.options.language:
            check_languages(cleaner.options.language)
        if cleaner.options.dedup == "minhash":
            check_minhash()
        self._work = functools.partial(_examine, cleaner, read_evaluations(evaluations))

    def run(self, folder: Path, cuts: Sequence[Position], first: int, is_over: Callable[[], bool]) -> None:
        """Ends when all shares are looked at, as `Examination`: does those that no other process has done or is at work
        on, and waits for those of others."""
        starts, count = list(itertools.pairwise(cuts)), len(cuts) - 1
        places = [folder / f"{number:05}" for number in range(1, count + 1)]
        for wait in (False, True):
            for number in (*range(first, count + 1), *range(1, first)):
                place, (start, stop) = places[number - 1], starts[number - 1]
                if Findings(place, start).is_complete:
                    continue
                if is_over():
                    return
                place.mkdir(parents=True, exist_ok=True)
                part = f" part {number}/{count}" if count > 1 else ""
                with ExitStack() as stack:
                    try:
                        stack.enter_context(
                            locked(place, f"waiting for another process, which cleans{part}", wait=wait)
                        )
                    except ValueError:  # for now, others are left to do
                        continue
                    if not is_over():
                        self._examine(Findings(place, start), stop, number, count)
        self.found = [Findings(place, start) for place, (start, _) in zip(places, starts, strict=True)]

    def decide(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns what is left out, int64 (n, 3), and the report, after `run`."""
        return _decide(self._cleaner.options, self._sources, self.found)

    def _examine(self, found: Findings, stop: Position, number: int, count: int) -> None:
        """Brings a share to its end."""
        if found.is_complete:
            return
        part = f" part {number}/{count}" if count > 1 else ""
        if found.documents:
            logger.info(f"cleaning{part} goes on after {found.documents:,} documents")
        before = list(itertools.accumulate((source.bytes for source in self._sources), initial=0))
        size = before[-1] // count  # about: shares hold whole records
        begin = size * (number - 1)
        processes = self._processes or min(cores(), 1 + (size >> 20))
        chunks, saved, pause = self._chunks(found.position, stop, found.start), time.monotonic(), SAVE_SECONDS
        with (
            found,
            Report(f"cleaning{part}", size, unit="documents", made=found.documents) as report,
            closing(work_in_order(chunks, processes, self._work, doing="cleaning")) as results,
        ):
            for chunk, examined in results:
                found.add(chunk, examined)
                report.update(before[chunk.start.source] + chunk.disk_bytes - begin, found.documents)
                if (now := time.monotonic()) - saved >= pause:
                    found.save()
                    saved = time.monotonic()
                    pause = max(SAVE_SECONDS, (saved - now) / SAVE_SHARE)
            found.save(is_complete=True)


def _decide(
    options: CleanOptions, sources: Sequence[Source], shares: Sequence[Findings]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns what is left out, int64 (n, 3), and the report."""
    removed: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = {}
    gone = [np.zeros((0, 3), np.int64)]
    lines = lines_before(shares)

    def where(place: Sequence[int], share: int) -> dict[str, Any]:
        source, line = place[0], place[3]
        return {"file": sources[source].name, "line": line + lines[share] * (source == shares[share].start.source)}

    for number, share in enumerate(shares):
        places = array("q")
        for rule, place, text in share.broken():
            removed[rule] += 1
            places.extend(place[:3])
            if len(known := examples.setdefault(rule, [])) < _EXAMPLES:
                known.append({**where(place, number), "text": text})
        gone.append(np.array(places, np.int64).reshape(-1, 3))
    if options.dedup != "none":
        left = Stacked([share.column("places") for share in shares])

        def shown(row: int) -> dict[str, Any]:
            (place,), (owner,) = left.take(np.array([row])).tolist(), left.owners(np.array([row])).tolist()
            return where(place, owner)

        first = equal = first_equal(*np.concatenate([share.column("digests") for share in shares]).T)
        if options.dedup == "minhash":
            signatures = Stacked([share.column("signatures") for share in shares])
            first = first_similar(signatures, equal, options.dedup_similarity)
        own = np.arange(len(left))
        for rule, again in (("equal", equal != own), ("similar", (first != own) & (equal == own))):
            rows = np.flatnonzero(again)
            gone.append(left.take(rows)[:, :3])
            if len(rows):
                removed[f"{rule} to another"] = len(rows)
                examples[f"{rule} to another"] = [{**shown(n), "other": shown(first[n])} for n in rows[:_EXAMPLES]]
    places = np.concatenate(gone)
    documents = sum(share.documents for share in shares)
    counts = {"documents": documents, "kept": documents - len(places), "removed": dict(sorted(removed.items()))}
    return places[np.lexsort(places.T[::-1])], {**counts, "examples": dict(sorted(examples.items()))}


def _examine(cleaner: Cleaner, evaluations: Runs, chunk: Chunk) -> Examined:
    options = cleaner.options
    broken, places, digests, signatures = [], [], [], []
    for place, text, is_blank in cleaner.placed(chunk):
        if is_blank:
            continue
        words = hashed_words(text) if evaluations or options.dedup == "minhash" else np.zeros(0, np.uint64)
        if rule := _broken_rule(options, text, words, evaluations):
            broken.append((rule, place, text[:_SHOWN_CHARACTERS]))
            continue
        places.append(place)
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
        digests.append(np.frombuffer(digest, np.uint64))
        if options.dedup == "minhash":
            # A text without a word, such as a line of dashes, is like no other.
            signatures.append(signature(words if len(words) else digests[-1]))
    return Examined(
        broken,
        np.array(places, np.int64).reshape(-1, 4),
        np.array(digests, np.uint64).reshape(-1, 2),
        np.array(signatures, np.uint32).reshape(-1, BANDS * ROWS),
    )


def _broken_rule(options: CleanOptions, text: str, words: np.ndarray, evaluations: Runs) -> str:
    """Returns the rule that removes a text whatever others say, "" for none."""
    if not text:
        return "c4: few sentences"
    if options.language and (code := language_of(text)) not in options.language:
        return f"in another language ({code})"
    if "c4" in options.quality and (rule := broken_rule_of_c4(text)):
        return f"c4: {rule}"
    if "gopher" in options.quality and (rule := broken_rule_of_gopher(text)):
        return f"gopher: {rule}"
    return "shared with an evaluation" if evaluations and is_contaminated(words, evaluations) else ""
