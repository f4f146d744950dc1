"""The finished parts of a preparation into one dataset, without copying a shard: `matmix prepare --merge --out OUT`.

Everything is checked before anything is changed. Then the small files of the whole are written, the shards are renamed
into their places, and the manifest is written. A merge that was stopped in between is finished by the same command:
which shard goes where follows from the parts.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.formats import make_format
from matmix.data.formats.base import Shard, ShardFormat, ShardInfo
from matmix.data.formats.split_writer import write_indices
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo, unigram_entropy
from matmix.data.prepare.checks import check_malformed, check_splits
from matmix.data.prepare.merge_checks import Part, check_input, check_part, check_tiling
from matmix.data.prepare.parts import MERGING_NAME, Parts
from matmix.data.prepare.progress import say
from matmix.data.prepare.report import print_summary, small_files
from matmix.data.prepare.state import HISTOGRAM_NAME, KEPT_EXAMPLES
from matmix.data.storage.files import sync_directory, write_atomic
from matmix.data.storage.urls import refuse_secrets


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig:
    """Join the parts of a preparation into one dataset."""

    out: str
    """The folder that the parts were given."""
    dry_run: bool = False
    """Only show the state of the parts, and check those that are finished."""
    max_malformed: float = 0.01
    """Share of all lines (or rows) that may be malformed."""

    def __post_init__(self) -> None:
        refuse_secrets(self.out, "prepare: out")


def merge(config: MergeConfig) -> Manifest | None:
    """Join the parts in `config.out`; None for a dry run.

    Raises FileNotFoundError if there are no parts, and ValueError (one line) if some are missing, are not of the same
    preparation, or do not hold every record of the input exactly once; nothing is changed then.
    """
    parts = Parts(config.out)
    if (parts.out / MANIFEST_NAME).exists():
        manifest = Manifest.load(parts.out)
        shutil.rmtree(parts.folder, ignore_errors=True)
        print_summary(manifest, parts.out, "earlier: nothing to do")
        return manifest
    facts = parts.facts()
    if config.dry_run:
        print(parts_table(parts), flush=True)
        if parts.missing():
            return None
    if missing := parts.missing():
        raise ValueError(_missing_sentence(parts, missing, facts["arguments"]))
    with parts.locked("joins the parts", wait=False):
        of, _ = parts.cuts()
        found = [check_part(parts, number, of, facts) for number in range(1, of + 1)]
        sources = check_input(facts)
        check_tiling(found, sources)
        plan = _Plan(parts, found)
        malformed = _malformed(found, sources)
        check_malformed(malformed["count"], malformed["records"], malformed["examples"], config.max_malformed)
        documents = {name: sum(p.manifest.splits[name].documents for p in found) for name in plan.splits}
        check_splits(documents, sources, facts["options"]["validation_fraction"])
        if config.dry_run:
            print("all parts are finished and fit together: they can be joined", flush=True)
            return None
        say(f"joining {of} parts in {parts.out}")
        manifest = _join(parts, found, plan, facts, malformed)
    shutil.rmtree(parts.folder, ignore_errors=True)
    print_summary(manifest, parts.out, f"from {of} parts")
    return manifest


def parts_table(parts: Parts) -> str:
    """The state of each part, a line each: finished with how many documents, begun, or not begun."""
    of, _ = parts.cuts()
    missing, lines = set(parts.missing()), []
    for number in range(1, of + 1):
        folder = parts.part(number, of)
        state = "begun, not finished" if folder.exists() else "not begun"
        if number not in missing:
            counts = [f"{split.documents:,} in {name}" for name, split in Manifest.load(folder).splits.items()]
            state = f"finished, documents: {', '.join(counts)}"
        lines.append(f"part {number}/{of}  {state}")
    return "\n".join(lines)


def _missing_sentence(parts: Parts, missing: list[int], arguments: list[str]) -> str:
    of, _ = parts.cuts()
    command = shlex.join(["matmix", "prepare", *arguments, "--out", str(parts.out), "--part", f"{missing[0]}/{of}"])
    names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    kind = "part is" if len(missing) == 1 else "parts are"
    return f"{len(missing)} of {of} {kind} not finished: {names}; make each with: {command}"


class _Plan:
    """Which shard of which part becomes which shard of the whole."""

    def __init__(self, parts: Parts, found: list[Part]) -> None:
        options, first = found[0].manifest.options, found[0].manifest
        self.format: ShardFormat = make_format(
            options["format"],
            dtype=first.dtype,
            compression=options["compression"],
            megabytes=options["shard_megabytes"],
        )
        self.splits = list(first.splits)
        self.shards: dict[str, list[Shard]] = {name: [] for name in self.splits}
        self.moves: list[tuple[Path, Path]] = []
        for name in self.splits:
            for part in found:
                for shard in part.record.shards[name]:
                    raw = self.format.file_name(len(self.shards[name]))
                    file = raw + shard.file.removeprefix(shard.raw_file)
                    self.shards[name].append(replace(shard, file=file, raw_file=raw))
                    self.moves.append((part.folder / name / shard.file, parts.out / name / file))
        for (source, target), shard in zip(self.moves, self._in_order(), strict=True):
            there = [path for path in (source, target) if path.is_file()]
            if not there or there[0].stat().st_size != shard.bytes:
                folder = source.parent.parent
                raise ValueError(f"{source} is missing or damaged; delete {folder} and make that part again")

    def _in_order(self) -> Iterator[Shard]:
        for name in self.splits:
            yield from self.shards[name]

    def infos(self, split: str) -> tuple[ShardInfo, ...]:
        return tuple(shard.info for shard in self.shards[split])


def _malformed(found: list[Part], sources: list[Any]) -> dict[str, Any]:
    """The manifest's entry for all parts; lines of the examples count from the beginning of their file."""
    examples, lines = [], [0] * len(sources)
    for part in found:
        first = part.share.start.source
        entered = part.share.name_of(sources[first].name) if first < len(sources) else None
        for example in part.manifest.malformed["examples"]:
            if example["file"] == entered:
                example = {**example, "file": sources[first].name, "line": example["line"] + lines[first]}
            examples.append(example)
        for source, *_, count, _records, _documents in part.record.spans:
            lines[source] += count
    counts = {name: sum(p.manifest.malformed[name] for p in found) for name in ("count", "records")}
    return {**counts, "examples": examples[:KEPT_EXAMPLES]}


def _join(parts: Parts, found: list[Part], plan: _Plan, facts: dict[str, Any], malformed: dict[str, Any]) -> Manifest:
    out, first = parts.out, found[0].manifest
    histogram = sum(_histogram(p) for p in found)
    buffer = io.BytesIO()
    np.save(buffer, histogram, allow_pickle=False)
    # A disk that is full is met here, before any shard has moved.
    write_atomic(out / HISTOGRAM_NAME, buffer.getvalue())
    parts.tokenizer().save(out / "tokenizer")
    splits = {}
    for name in plan.splits:
        (out / name).mkdir(exist_ok=True)
        lengths = (_lengths_of(part, name).astype("<u4").tobytes() for part in found)
        write_indices(out / name, plan.format, plan.shards[name], lengths)
        infos = [p.manifest.splits[name] for p in found]
        sums = {key: sum(getattr(info, key) for info in infos) for key in ("documents", "tokens", "bytes")}
        splits[name] = SplitInfo(**sums, shards=plan.infos(name))
    write_atomic(parts.folder / MERGING_NAME, b"")
    for source, target in plan.moves:
        if source.exists():
            os.replace(source, target)
    for name in plan.splits:
        sync_directory(out / name)
    documents = [sum(p.manifest.sources[i]["documents"] for p in found) for i in range(len(first.sources))]
    manifest = replace(
        first,
        splits=splits,
        unigram_entropy=unigram_entropy(histogram),
        sources=tuple({**s, "documents": count} for s, count in zip(first.sources, documents, strict=True)),
        malformed=malformed,
        empty_documents=sum(p.manifest.empty_documents for p in found),
        options=facts["options"],
        files=small_files(out, splits),
    )
    write_atomic(out / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def _histogram(part: Part) -> np.ndarray:
    path = part.folder / HISTOGRAM_NAME
    return read_vector(path, "int64", path, length=part.manifest.tokenizer.vocab_size)


def _lengths_of(part: Part, split: str) -> np.ndarray:
    path = part.folder / split / "lengths.npy"
    return read_vector(path, "uint32", path, length=part.manifest.splits[split].documents)
