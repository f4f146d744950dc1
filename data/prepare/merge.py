"""The finished parts of a preparation into one dataset, without copying a shard: `matmix prepare --merge --out OUT`.

Everything is checked before anything is changed. Then the small files of the whole are written, the shards are renamed
into their places, and the manifest is written. A merge that was stopped in between is finished by the same command:
which shard goes where follows from the parts.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.artifacts import errors_in_one_line, shell_line
from matmix.data.formats import make_format
from matmix.data.formats.base import Shard, ShardFormat
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.parts import MERGING_NAME, Parts, Share, missing_parts, read_spans
from matmix.data.prepare.readers import rows_of
from matmix.data.prepare.report import check_malformed, check_splits, print_summary, write_manifest
from matmix.data.prepare.sources import Source, find_sources
from matmix.data.prepare.workspace import (
    KEPT_EXAMPLES,
    Progress,
    compare_preparations,
    locked,
    read_histogram,
    write_histogram,
)
from matmix.data.splits.writer import write_indices
from matmix.data.storage.files import sha256_of, sync_directory, write_atomic
from matmix.data.storage.remote import refuse_secrets

logger = logging.getLogger(__name__)

_BOM_BYTES = 3
BUSY = "another process is at work in {} right now"


def merge(out: str, *, dry_run: bool = False, max_malformed: float = 0.01) -> Manifest | None:
    """Join the parts of a preparation in the folder `out` into one dataset; None for a dry run.

    Args:
        dry_run: only show the state of the parts, and check those that are finished.
        max_malformed: share of all lines (or rows) that may be malformed.

    Raises FileNotFoundError if there are no parts, and ValueError (one line) if some are missing, are not of the same
    preparation, or do not hold every record of the input exactly once; nothing is changed then.
    """
    refuse_secrets(out, "prepare: out")
    parts = Parts(out)
    if (parts.out / MANIFEST_NAME).exists():
        manifest = Manifest.load(parts.out)
        shutil.rmtree(parts.folder, ignore_errors=True)
        print_summary(manifest, parts.out, "earlier: nothing to do")
        return manifest
    facts, of = parts.facts(), len(parts.cuts()) - 1
    if not all_made(parts, of, facts["arguments"], dry_run=dry_run):
        return None
    with locked(parts.folder, BUSY.format(parts.folder)):
        found = [check_part(parts, number, of, facts) for number in range(1, of + 1)]
        sources = check_input(facts)
        for part in found:
            check_tiling(part, sources)
        tokenizer, options = parts.tokenizer(), facts["options"]
        shard_format = make_format(options, found[0].manifest.dtype)
        shards, moves = plan_moves(parts, found, shard_format)
        splits = {
            name: SplitInfo.of(shards[name], sum(part.manifest.splits[name].bytes for part in found)) for name in shards
        }
        progress = add_up(found, sources)
        check_malformed(progress, max_malformed)
        check_splits(splits, sources, options["validation_fraction"])
        if dry_run:
            print("all parts are finished and fit together: they can be joined", flush=True)
            return None
        logger.info(f"joining {of} parts in {parts.out}")
        # A disk that is full is met here, before any shard has moved.
        histograms = (read_histogram(part.folder, part.manifest.tokenizer.vocab_size) for part in found)
        write_histogram(parts.out, sum(histograms))
        tokenizer.save(parts.out / "tokenizer")
        write_splits(parts, found, shard_format, shards)
        move_shards(parts, shards, moves)
        manifest = write_manifest(parts.out, options, sources, tokenizer, shard_format, splits, progress)
    shutil.rmtree(parts.folder, ignore_errors=True)
    print_summary(manifest, parts.out, f"from {of} parts")
    return manifest


def all_made(parts: Parts, of: int, arguments: list[str], *, dry_run: bool, unit: str = "documents") -> bool:
    """Whether all parts are finished; a dry run shows the state of each. Raises ValueError (one line) if some are not,
    and it is no dry run."""
    missing = missing_parts(parts.out, of)
    if dry_run:
        print(parts_table(parts, of, missing, unit), flush=True)
    elif missing:
        raise ValueError(missing_sentence(parts, of, missing, arguments))
    return not missing


def write_splits(
    parts: Parts, found: Sequence[FinishedPart], shard_format: ShardFormat, shards: dict[str, list[Shard]]
) -> None:
    """Writes the lengths and the index of each split of the whole."""
    for name, numbered in shards.items():
        (parts.out / name).mkdir(exist_ok=True)
        lengths = (part.lengths(name).astype("<u4").tobytes() for part in found)
        write_indices(parts.out / name, shard_format, numbered, lengths)


def move_shards(parts: Parts, splits: Iterable[str], moves: Iterable[tuple[Path, Path]]) -> None:
    """Renames the shards into their places; those that are there were moved by a merge that was stopped."""
    write_atomic(parts.folder / MERGING_NAME, b"")
    for source, target in moves:
        if source.exists():
            os.replace(source, target)
    for name in splits:
        sync_directory(parts.out / name)


def parts_table(parts: Parts, of: int, missing: list[int], unit: str) -> str:
    """The state of each part, a line each: finished with how many documents, begun, or not begun."""
    lines, unfinished = [], set(missing)
    for number in range(1, of + 1):
        folder = parts.part(number, of)
        state = "begun, not finished" if folder.exists() else "not begun"
        if number not in unfinished:
            counts = [f"{split.documents:,} in {name}" for name, split in Manifest.load(folder).splits.items()]
            state = f"finished, {unit}: {', '.join(counts)}"
        lines.append(f"part {number}/{of}  {state}")
    return "\n".join(lines)


def missing_sentence(parts: Parts, of: int, missing: list[int], arguments: list[str]) -> str:
    """Which parts are missing, and how the first of them is made."""
    command = shell_line(*parts.verb.split(), *arguments, "--out", parts.out, "--part", f"{missing[0]}/{of}")
    names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    kind = "part is" if len(missing) == 1 else "parts are"
    return f"{len(missing)} of {of} {kind} not finished: {names}; make each with: {command}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPart:
    """A finished part of any preparation."""

    folder: Path
    manifest: Manifest

    def lengths(self, split: str) -> np.ndarray:
        path = self.folder / split / "lengths.npy"
        return read_vector(path, "uint32", path, length=self.manifest.splits[split].documents)

    @property
    def again(self) -> str:
        """What to do about one that cannot be used."""
        return f"delete {self.folder} and make that part again"

    def check_files(self) -> None:
        """Raises ValueError unless the small files are as they were written."""
        for name, digest in self.manifest.files.items():
            if not (self.folder / name).is_file() or sha256_of(self.folder / name) != digest:
                raise ValueError(f"{self.folder / name} is missing, damaged or was changed; {self.again}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(FinishedPart):
    """A finished part of a preparation of text."""

    share: Share
    spans: list[list[int]]
    """As in `Progress`."""


def plan_moves(
    parts: Parts, found: Sequence[FinishedPart], shard_format: ShardFormat
) -> tuple[dict[str, list[Shard]], list[tuple[Path, Path]]]:
    """The shards of the whole, by split, and where the file of each is and will be. Raises ValueError if one is
    missing."""
    shards: dict[str, list[Shard]] = {name: [] for name in found[0].manifest.splits}
    moves: list[tuple[Path, Path]] = []
    for name, numbered in shards.items():
        for part in found:
            for shard in part.manifest.splits[name].shards:
                file, raw_file = shard_format.packed_name(len(numbered)), shard_format.file_name(len(numbered))
                numbered.append(Shard(**{**asdict(shard), "file": file, "raw_file": raw_file}))
                source, target = part.folder / name / shard.file, parts.out / name / file
                moves.append((source, target))
                there = [path for path in (source, target) if path.is_file()]
                if not there or there[0].stat().st_size != shard.bytes:
                    raise ValueError(f"{source} is missing or damaged; {part.again}")
    return shards, moves


def add_up(found: list[Part], sources: list[Source]) -> Progress:
    """What all parts have read and met; lines of the examples count from the beginning of their file."""
    total, lines = Progress(), [0] * len(sources)
    for part in found:
        met, first = part.manifest.malformed, part.share.start.source
        named = part.share.name(sources)
        for example in met["examples"][: KEPT_EXAMPLES - len(total.examples)]:
            if first < len(sources) and named[first] is not sources[first] and example["file"] == named[first].name:
                example = {**example, "file": sources[first].name, "line": example["line"] + lines[first]}
            total.examples.append(example)
        total.records += met["records"]
        total.malformed += met["count"]
        total.empty += part.manifest.empty_documents
        total.spans += part.spans
        for source, _, _, count, *_ in part.spans:
            lines[source] += count
    return total


@errors_in_one_line(KeyError, TypeError, IndexError, AttributeError)
def check_part(parts: Parts, number: int, of: int, facts: dict[str, Any]) -> Part:
    """Part `number`. Raises ValueError unless it is of this preparation, made with the parts' tokenizer, and says the
    same number of documents everywhere."""
    folder = parts.part(number, of)
    manifest, spans, share = Manifest.load(folder), read_spans(folder), parts.share(number, of, list)
    part = Part(folder=folder, share=share, manifest=manifest, spans=spans)
    compare_preparations(folder, manifest.options, {**facts["options"], "part": f"{number}/{of}"})
    if manifest.tokenizer.sha256 != facts["tokenizer"]:
        raise ValueError(f"{folder} was made with another tokenizer than {parts.folder / 'tokenizer'}; {part.again}")
    part.check_files()
    counts = {
        "part.json": sum(span[5] for span in spans),
        "the manifest": sum(split.documents for split in manifest.splits.values()),
        "its sources": sum(source["documents"] for source in manifest.sources),
        "lengths.npy": sum(len(part.lengths(name)) for name in manifest.splits),
    }
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise ValueError(f"{folder} does not agree with itself on its number of documents ({said}); {part.again}")
    return part


def check_input(facts: dict[str, Any]) -> list[Source]:
    """The input files. Raises ValueError unless they are as they were when the parts were begun."""
    sources = []
    for path, name, (_, size, digest) in zip(facts["paths"], facts["names"], facts["options"]["inputs"], strict=True):
        try:
            (source,), _ = find_sources([path])
            same = source.bytes == size and source.digest() == digest
        except (FileNotFoundError, ValueError):
            raise ValueError(f"the input file {path} cannot be found any more; put it back to join the parts") from None
        if not same:
            raise ValueError(f"the input file {path} has changed since the parts were begun; prepare it anew")
        sources.append(Source(name, path, source.kind, source.compression, source.bytes))
    return sources


def check_tiling(part: Part, sources: list[Source]) -> None:
    """Raises ValueError unless what a part has read is its share of every source, each record once."""
    start, stop = part.share.start, part.share.stop
    given = range(start.source, min(stop.source + 1, len(sources)))
    if not {span[0] for span in part.spans} <= set(given):
        raise ValueError(f"{part.folder} has read files that belong to other parts; {part.again}")
    for number in given:
        name, reached = sources[number].name, start.offset if number == start.source else 0
        end = stop.offset if number == stop.source else _end(sources[number])
        for begin, last in (span[1:3] for span in part.spans if span[0] == number):
            marked = reached == 0 and begin == _BOM_BYTES and sources[number].kind != "parquet"
            if not (begin == reached or marked) or (end is not None and last > end):
                what = "are lost" if begin > reached else "come twice, or belong to another part"
                raise ValueError(
                    f"{part.folder} begins at {begin:,} in {name} where what comes before it ends at {reached:,}: "
                    f"records {what}; {part.again}"
                )
            reached = last
        # A file of a byte order mark alone has no records.
        if end is not None and reached != end and (number == stop.source or end > _BOM_BYTES):
            raise ValueError(
                f"{part.folder} ends at {reached:,} in {name} instead of {end:,}: records are lost; {part.again}"
            )


def _end(source: Source) -> int | None:
    """The offset at the end of a source, None where only reading all of it would tell."""
    if source.kind == "parquet":
        return rows_of(source)
    return None if source.compression else source.bytes
