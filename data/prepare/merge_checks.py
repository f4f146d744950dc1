"""What must be true of the parts of a preparation before they are joined."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matmix.data.arrays import read_vector
from matmix.data.artifacts import errors_in_one_line
from matmix.data.manifest import Manifest
from matmix.data.prepare.cuts import rows_of
from matmix.data.prepare.parts import PartRecord, Parts, Share
from matmix.data.prepare.sources import Source, find_sources
from matmix.data.prepare.state import HISTOGRAM_NAME, compare_preparations
from matmix.data.storage.files import sha256_of

_BOM_BYTES = 3


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


def _lost(part: Part, name: str, reached: int, end: int) -> None:
    raise ValueError(
        f"{part.folder} ends at {reached:,} in {name} instead of {end:,}: records are lost; "
        f"delete {part.folder} and make that part again"
    )
