"""Joins the finished parts of a preparation into one dataset, without copying a shard.

    matmix prepare --merge --out OUT

Everything is checked before anything is changed. Then the small files of the whole are written, the shards renamed into
their places, and the manifest is written. The same command finishes a merge that was stopped.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.artifacts import errors_in_one_line, shell_line
from matmix.data.formats import make_format
from matmix.data.formats.base import ShardFormat, ShardInfo
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.base import KEPT_EXAMPLES, Preparation, Progress
from matmix.data.prepare.parts import MERGING_NAME, Parts, Share, missing_parts, read_spans
from matmix.data.prepare.report import Prepared, print_summary
from matmix.data.prepare.workspace import SUMS_NAME, compare_preparations, locked
from matmix.data.splits.writer import write_indices
from matmix.data.storage.files import sha256_of, sync_directory, write_atomic
from matmix.data.storage.remote import refuse_secrets

logger = logging.getLogger(__name__)


def merge(out: str, kind: type[Preparation], *, dry_run: bool = False, most_broken: float = 0.01) -> Manifest | None:
    """Joins the parts of a preparation in the folder `out` into one dataset; returns None for a dry run, which only
    checks.

    most_broken: share of all records that may be broken. Raises FileNotFoundError if there are no parts, and ValueError
    (one line) if some are missing, are not of the same preparation, or do not hold every record of the input exactly
    once; nothing is changed then.
    """
    refuse_secrets(out, f"{kind.verb.removeprefix('matmix ')}: out")
    parts = Parts(out, kind)
    if (parts.out / MANIFEST_NAME).exists():
        manifest = Manifest.load(parts.out)
        shutil.rmtree(parts.folder, ignore_errors=True)
        print_summary(kind, manifest, parts.out, "earlier: nothing to do")
        return manifest
    facts, shares = parts.facts(), parts.shares()
    missing = missing_parts(parts.out, len(shares))
    if dry_run:
        print(_parts_table(parts, shares, missing), flush=True)
    elif missing:
        words = [*kind.verb.split(), *facts["arguments"], "--out", parts.out, "--part", f"{missing[0]}/{len(shares)}"]
        numbers = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        are = f"{len(missing)} of {len(shares)} {'part is' if len(missing) == 1 else 'parts are'} not finished"
        raise ValueError(f"{are}: {numbers}; make each with: {shell_line(*words)}")
    if missing:
        return None
    with locked(parts.folder, f"another process is at work in {parts.folder} right now"):
        if changed := kind.changed_input(facts):
            raise ValueError(f"the input file {changed} since the parts were begun; put it back, or prepare it anew")
        finished = [_read_part(parts, share, facts) for share in shares]
        for part in finished:
            _check_tiling(part, facts["names"], parts.ends())
        parts.check_shared(parts.folder, f"delete {parts.folder}")
        options = facts["options"]
        shard_format = make_format(options, finished[0].manifest.dtype)
        splits, moves = _plan_moves(parts, finished, shard_format)
        progress, sums = _add_up(kind, finished, facts["names"])
        joined = Prepared(kind, parts.out, options, facts["names"], shard_format, splits, progress, sums)
        joined.check(most_broken)
        if dry_run:
            print("all parts are finished and fit together: they can be joined", flush=True)
            return None
        logger.info(f"joining {len(shares)} parts in {parts.out}")
        # A full disk is met here, before any shard has moved.
        for name in facts["shared"]:
            (parts.out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(parts.out / name, (parts.folder / name).read_bytes())
        kind.finish(parts.out, options, list(splits), sums)
        for name, split in splits.items():
            (parts.out / name).mkdir(exist_ok=True)
            lengths = (part.lengths(name).astype("<u4").tobytes() for part in finished)
            write_indices(parts.out / name, shard_format, split.shards, lengths)
        write_atomic(parts.folder / MERGING_NAME, b"")
        for source, target in moves:
            if source.exists():  # otherwise a merge that was stopped has moved it
                os.replace(source, target)
        for name in splits:
            sync_directory(parts.out / name)
        manifest = joined.write_manifest()
    shutil.rmtree(parts.folder, ignore_errors=True)
    print_summary(kind, manifest, parts.out, f"from {len(shares)} parts")
    return manifest


def _parts_table(parts: Parts, shares: Sequence[Share], missing: Sequence[int]) -> str:
    """Returns the state of each part, a line each."""
    lines = []
    for share in shares:
        folder = parts.part(share)
        if share.number in missing:
            state = "begun, not finished" if folder.exists() else "not begun"
        else:
            counts = [f"{split.documents:,} in {name}" for name, split in Manifest.load(folder).splits.items()]
            state = f"finished, {parts.kind.unit}: {', '.join(counts)}"
        lines.append(f"part {share.number}/{share.of}  {state}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A finished part."""

    folder: Path
    manifest: Manifest
    share: Share
    spans: list[list[int]]
    """Those of `Progress`."""

    def lengths(self, split: str) -> np.ndarray:
        path = self.folder / split / "lengths.npy"
        return read_vector(path, "uint32", path, length=self.manifest.splits[split].documents)

    @property
    def again(self) -> str:
        """Advice where it cannot be used."""
        return f"delete {self.folder} and make that part again"


@errors_in_one_line(KeyError, TypeError, IndexError, AttributeError)
def _read_part(parts: Parts, share: Share, facts: dict[str, Any]) -> Part:
    """Returns a part. Raises ValueError unless it is of this preparation, whole, and agrees with itself."""
    folder = parts.part(share)
    part = Part(folder=folder, share=share, manifest=Manifest.load(folder), spans=read_spans(folder))
    manifest = part.manifest
    compare_preparations(folder, manifest.options, {**facts["options"], "part": f"{share.number}/{share.of}"})
    parts.check_shared(folder, part.again)
    for name, digest in manifest.files.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            raise ValueError(f"{folder / name} is missing, damaged or was changed; {part.again}")
    counts = {
        "part.json": sum(span[5] for span in part.spans),
        "the manifest": sum(split.documents for split in manifest.splits.values()),
        "its sources": sum(source["documents"] for source in manifest.sources),
        "lengths.npy": sum(len(part.lengths(name)) for name in manifest.splits),
    }
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise ValueError(f"{folder} does not agree with itself on its number of documents ({said}); {part.again}")
    return part


def _check_tiling(part: Part, names: Sequence[str], ends: Sequence[int | None]) -> None:
    """Raises ValueError unless the part has read its share of every source, each record once."""
    start, stop = part.share.start, part.share.stop
    given = range(start.source, min(stop.source + 1, len(names)))
    if not {span[0] for span in part.spans} <= set(given):
        raise ValueError(f"{part.folder} has read files that belong to other parts; {part.again}")
    for number in given:
        name, reached = names[number], start.offset if number == start.source else 0
        end = stop.offset if number == stop.source else ends[number]
        ends_here = [] if end is None else [(end, end)]
        for begin, last in [*(span[1:3] for span in part.spans if span[0] == number), *ends_here]:
            if begin != reached:
                what = "are lost" if begin > reached else "come twice, or belong to another part"
                raise ValueError(
                    f"{part.folder} goes on at {begin:,} in {name} where what comes before it ends at {reached:,}: "
                    f"records {what}; {part.again}"
                )
            reached = last


def _plan_moves(
    parts: Parts, finished: Sequence[Part], shard_format: ShardFormat
) -> tuple[dict[str, SplitInfo], list[tuple[Path, Path]]]:
    """Returns the splits of the whole, and where the file of each shard is and will be."""
    splits: dict[str, SplitInfo] = {}
    moves: list[tuple[Path, Path]] = []
    for name in finished[0].manifest.splits:
        shards: list[ShardInfo] = []
        for part in finished:
            for shard in part.manifest.splits[name].shards:
                shards.append(replace(shard, file=shard_format.packed_name(len(shards))))
                source, target = part.folder / name / shard.file, parts.out / name / shards[-1].file
                moves.append((source, target))
                there = [path for path in (source, target) if path.is_file()]
                if not there or there[0].stat().st_size != shard.bytes:
                    raise ValueError(f"{source} is missing or damaged; {part.again}")
        splits[name] = SplitInfo.of(shards, sum(part.manifest.splits[name].bytes for part in finished))
    return splits, moves


def _add_up(kind: type[Preparation], finished: Sequence[Part], names: Sequence[str]) -> tuple[Progress, np.ndarray]:
    """Returns what all parts have read, and the sums over their documents."""
    total, lines, sums = Progress(), [0] * len(names), None
    for part in finished:
        path = part.folder / SUMS_NAME
        more = read_vector(path, "int64", path, length=None if sums is None else len(sums))
        if sums is None:
            sums = more.copy()
        else:
            kind.add(sums, more)
        met, start = part.manifest.malformed, part.share.start.source
        for example in met["examples"][: KEPT_EXAMPLES - len(total.examples)]:
            # A part that enters a text in the middle names the place, and counts lines from there.
            if start < len(names) and example["file"].startswith(f"{names[start]} from byte "):
                example = {**example, "file": names[start], "line": example["line"] + lines[start]}
            total.examples.append(example)
        total.records += met["records"]
        total.malformed += met["count"]
        total.empty += part.manifest.empty_documents
        total.spans += part.spans
        for source, _, _, count, *_ in part.spans:
            lines[source] += count
    return total, sums
