"""Cleans an input: one pass over all of it decides which documents are left out, before any shard is written.

    OUT/cleaning/removed.npy    int64 (3 n,), ascending: number of the source, offset of the record, document in it
    OUT/cleaning/report.json    how many documents each rule removed, and the first five of them

Whoever makes shards reads the input through a `Cleaner`, which passes over those documents. In parts the first process
makes the two files, and the others take them: what is left does not depend on the number of parts or processes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.artifacts import fits, is_count, one_line, parse_json
from matmix.data.prepare.base import Chunk, Malformed, Position, Source, read_chunks
from matmix.data.prepare.cleaning import CleanOptions
from matmix.data.prepare.cleaning.duplicates import BANDS, ROWS, check_minhash, first_equal, first_similar, signature
from matmix.data.prepare.cleaning.evaluations import Runs, is_contaminated, read_evaluations
from matmix.data.prepare.cleaning.findings import Examined, Findings, Place
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
from matmix.data.storage.files import sha256_of
from matmix.data.storage.remote import scratch_folder

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


def facts(options: CleanOptions) -> dict[str, Any]:
    """Returns what decides the contents beside the options: digests of the files of evaluations. Raises
    FileNotFoundError where there is none."""
    paths = [Path(path).expanduser() for path in options.decontaminate]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"the evaluation file {path} does not exist")
    return {"decontaminate": sorted(map(sha256_of, paths))} if paths else {}


def clean(
    cleaner: Cleaner, folder: Path, sources: Sequence[Source], processes: int, wanted: Mapping[str, Any]
) -> tuple[Cleaner, dict[str, bytes]]:
    """Returns the cleaner that knows what is left out, and the files of this in a dataset. folder: may have them
    already. processes: 0 for one a core, as far as there is work. wanted: the fingerprint of the preparation. Raises
    ValueError (one line) where nothing is left, and for options that cannot be met."""
    names = (REMOVED_NAME, REPORT_NAME)
    if all((folder / name).is_file() for name in names):
        files = {name: (folder / name).read_bytes() for name in names}
        return replace(cleaner, removed=read_removed(folder)), files
    removed, report = _examine_all(cleaner, sources, processes, wanted)
    if report["documents"] and not report["kept"]:
        raise ValueError(f"cleaning leaves none of the {report['documents']:,} documents: {in_words(report)}")
    buffer = io.BytesIO()
    np.save(buffer, removed.reshape(-1))
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    return replace(cleaner, removed=removed), dict(zip(names, (buffer.getvalue(), text.encode()), strict=True))


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


def _examine_all(
    cleaner: Cleaner, sources: Sequence[Source], processes: int, wanted: Mapping[str, Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns what is left out, int64 (n, 3), and the report. A pass that was stopped goes on."""
    options = cleaner.options
    if options.language:
        check_languages(options.language)
    if options.dedup == "minhash":
        check_minhash()
    evaluations = read_evaluations(options.decontaminate)
    total = sum(source.bytes for source in sources)
    before = list(itertools.accumulate((source.bytes for source in sources), initial=0))
    processes = processes or min(cores(), 1 + (total >> 20))
    folder = scratch_folder("clean", hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest())
    folder.mkdir(exist_ok=True)
    with locked(folder, "another process is cleaning the same input right now"), Findings(folder) as found:
        if found.documents:
            logger.info(f"cleaning goes on after {found.documents:,} documents")
        chunks, work = read_chunks(sources, found.position), functools.partial(_examine, cleaner, evaluations)
        saved, pause = time.monotonic(), SAVE_SECONDS
        try:
            with (
                Report("cleaning", total, unit="documents", made=found.documents) as report,
                closing(work_in_order(chunks, processes, work, doing="cleaning")) as results,
            ):
                for chunk, examined in results:
                    found.add(chunk.end, examined)
                    report.update(before[chunk.start.source] + chunk.disk_bytes, found.documents)
                    if (now := time.monotonic()) - saved >= pause:
                        found.save()
                        saved = time.monotonic()
                        pause = max(SAVE_SECONDS, (saved - now) / SAVE_SHARE)
            decided = _decide(options, sources, found)
        except ValueError:  # of the input, which will be another one
            shutil.rmtree(folder, ignore_errors=True)
            raise
    shutil.rmtree(folder, ignore_errors=True)
    return decided


def _decide(options: CleanOptions, sources: Sequence[Source], found: Findings) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns what is left out, int64 (n, 3), and the report."""
    removed: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = {}
    gone: list[tuple[int, ...]] = []

    def where(place: Sequence[int]) -> dict[str, Any]:
        return {"file": sources[place[0]].name, "line": int(place[3])}

    def remove(rule: str, place: Sequence[int], **shown: Any) -> None:
        removed[rule] += 1
        gone.append(tuple(place[:3]))
        if len(known := examples.setdefault(rule, [])) < _EXAMPLES:
            known.append({**where(place), **shown})

    for rule, place, text in found.broken():
        remove(rule, place, text=text)
    left = found.column("places")
    if options.dedup != "none":
        own = np.arange(len(left))
        first = first_equal(*found.column("digests").T)
        equal = first != own
        if options.dedup == "minhash":
            first = first_similar(found.column("signatures"), options.dedup_similarity)
        for one in np.flatnonzero(first != own).tolist():
            rule = "equal to another" if equal[one] else "similar to another"
            remove(rule, left[one].tolist(), other=where(left[first[one]]))
    counts = {
        "documents": found.documents,
        "kept": found.documents - len(gone),
        "removed": dict(sorted(removed.items())),
    }
    return np.array(sorted(gone), np.int64).reshape(-1, 3), {**counts, "examples": dict(sorted(examples.items()))}


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
