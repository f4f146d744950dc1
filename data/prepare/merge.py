"""The finished parts of a preparation into one dataset, without copying a shard: `matmix prepare --merge --out OUT`.

Everything is checked before anything is changed. Then the small files of the whole are written, the shards are renamed
into their places, and the manifest is written. A merge that was stopped in between is finished by the same command:
which shard goes where follows from the parts.
"""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.artifacts import errors_in_one_line
from matmix.data.formats import make_format
from matmix.data.formats.base import Shard
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo, unigram_entropy
from matmix.data.prepare.parts import MERGING_NAME, PartRecord, Parts, Share
from matmix.data.prepare.readers import rows_of
from matmix.data.prepare.report import check_malformed, check_splits, print_summary, small_files
from matmix.data.prepare.sources import Source, find_sources
from matmix.data.prepare.workspace import HISTOGRAM_NAME, KEPT_EXAMPLES, compare_preparations, write_histogram
from matmix.data.progress import say
from matmix.data.splits.writer import write_indices
from matmix.data.storage.files import sha256_of, sync_directory, write_atomic
from matmix.data.storage.urls import refuse_secrets

_BOM_BYTES = 3


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
        documents = {name: sum(p.manifest.splits[name].documents for p in found) for name in plan.shards}
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
        named = {"compression": options["compression"], "megabytes": options["shard_megabytes"]}
        self.format = make_format(options["format"], dtype=first.dtype, **named)
        self.shards: dict[str, list[Shard]] = {name: [] for name in first.splits}
        self.moves: list[tuple[Path, Path]] = []
        for name, shards in self.shards.items():
            for part in found:
                for shard in part.record.shards[name]:
                    raw = self.format.file_name(len(shards))
                    file = raw + shard.file.removeprefix(shard.raw_file)
                    shards.append(replace(shard, file=file, raw_file=raw))
                    source, target = part.folder / name / shard.file, parts.out / name / file
                    self.moves.append((source, target))
                    there = [path for path in (source, target) if path.is_file()]
                    if not there or there[0].stat().st_size != shard.bytes:
                        raise ValueError(
                            f"{source} is missing or damaged; delete {part.folder} and make that part again"
                        )


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
    # A disk that is full is met here, before any shard has moved.
    write_histogram(out, histogram)
    parts.tokenizer().save(out / "tokenizer")
    splits = {}
    for name in plan.shards:
        (out / name).mkdir(exist_ok=True)
        lengths = (_lengths_of(part, name).astype("<u4").tobytes() for part in found)
        write_indices(out / name, plan.format, plan.shards[name], lengths)
        infos = [p.manifest.splits[name] for p in found]
        sums = {key: sum(getattr(info, key) for info in infos) for key in ("documents", "tokens", "bytes")}
        splits[name] = SplitInfo(**sums, shards=tuple(shard.info for shard in plan.shards[name]))
    write_atomic(parts.folder / MERGING_NAME, b"")
    for source, target in plan.moves:
        if source.exists():
            os.replace(source, target)
    for name in splits:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A finished part."""

    folder: Path
    share: Share
    manifest: Manifest
    record: PartRecord


@errors_in_one_line(KeyError, TypeError, IndexError, AttributeError)
def check_part(parts: Parts, number: int, of: int, facts: dict[str, Any]) -> Part:
    """Part `number`. Raises ValueError unless it is of this preparation, made with the parts' tokenizer, and says the
    same number of documents everywhere."""
    folder = parts.part(number, of)
    again = f"delete {folder} and make that part again"
    manifest, record = Manifest.load(folder), PartRecord.load(folder)
    compare_preparations(folder, manifest.options, {**facts["options"], "part": f"{number}/{of}"})
    if manifest.tokenizer.sha256 != facts["tokenizer"]:
        raise ValueError(f"{folder} was made with another tokenizer than {parts.folder / 'tokenizer'}; {again}")
    counts = {"part.json": sum(span[5] for span in record.spans)}
    counts["the manifest"] = sum(split.documents for split in manifest.splits.values())
    counts["its sources"] = sum(source["documents"] for source in manifest.sources)
    counts["its shards"] = sum(shard.documents for shards in record.shards.values() for shard in shards)
    counts["lengths.npy"] = sum(_count_lengths(folder / name, again) for name in manifest.splits)
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise ValueError(f"{folder} does not agree with itself on its number of documents ({said}); {again}")
    if (record.number, record.of) != (number, of) or not (folder / HISTOGRAM_NAME).is_file():
        raise ValueError(f"{folder} is not part {number} of {of}, or it is damaged; {again}")
    for name, digest in manifest.files.items():
        if sha256_of(folder / name) != digest:
            raise ValueError(f"{folder / name} is damaged or was changed; {again}")
    share = parts.share(number, of, list)
    return Part(folder=folder, share=share, manifest=manifest, record=record)


def _count_lengths(split: Path, again: str) -> int:
    try:
        return len(read_vector(split / "lengths.npy", "uint32", "it"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{split / 'lengths.npy'} is missing or damaged ({error}); {again}") from None


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


def check_tiling(found: list[Part], sources: list[Source]) -> None:
    """Raises ValueError unless what the parts read, put together, is every source from its beginning to its end, each
    record once."""
    reached: dict[int, int] = {}
    for part in found:
        start, stop = part.share.start, part.share.stop
        for source, begin, end, *_ in part.record.spans:
            name = sources[source].name
            inside = (start.source, start.offset) <= (source, begin) and (source, end) <= (stop.source, stop.offset)
            expected = reached.get(source, 0)
            if source not in reached and begin == _BOM_BYTES and sources[source].kind != "parquet":
                expected = begin
            if begin != expected or not inside:
                what = "are lost" if begin > expected else "come twice, or belong to another part"
                raise ValueError(
                    f"{part.folder} begins at {begin:,} in {name} where the parts before it end at {expected:,}: "
                    f"records {what}; delete {part.folder} and make that part again"
                )
            reached[source] = end
        if stop.offset and reached.get(stop.source, 0) != stop.offset:
            _lost(part, sources[stop.source].name, reached.get(stop.source, 0), stop.offset)
        for source in range(start.source, min(stop.source, len(sources))):
            end = _end(sources[source])
            if end is not None and reached.get(source, 0) != end and end > _BOM_BYTES:
                _lost(part, sources[source].name, reached.get(source, 0), end)


def _end(source: Source) -> int | None:
    """The offset at the end of a source, None where only reading all of it would tell."""
    if source.kind == "parquet":
        return rows_of(source)
    return None if source.compression else source.bytes


def _lost(part: Part, name: str, reached: int, end: int) -> NoReturn:
    raise ValueError(
        f"{part.folder} ends at {reached:,} in {name} instead of {end:,}: records are lost; "
        f"delete {part.folder} and make that part again"
    )
