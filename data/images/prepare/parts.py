"""The parts of a preparation of pictures, made at the same time on a file system that the machines share, and their
merge into one dataset.

    OUT/parts/options.json            what is prepared, of how many pictures, in how many parts
    OUT/parts/part-00003-of-00064/    part 3: a dataset of its own, and part.json, which says what it read

Each part has as many pictures as the others, give or take one: where it begins follows from that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.artifacts import errors_in_one_line, one_line, parse_json
from matmix.data.formats import make_format
from matmix.data.formats.base import PICTURES
from matmix.data.images.prepare.base import Source
from matmix.data.images.prepare.report import check_corrupt, check_splits, print_summary, write_manifest
from matmix.data.images.prepare.statistics import Statistics
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.merge import (
    BUSY,
    FinishedPart,
    all_made,
    move_shards,
    plan_moves,
    write_splits,
)
from matmix.data.prepare.parts import Parts
from matmix.data.prepare.sources import Position
from matmix.data.prepare.workspace import KEPT_EXAMPLES, PART_NAME, Progress, compare_preparations, locked
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import refuse_secrets


@dataclass(frozen=True, slots=True)
class ImageShare:
    """The pictures of a part: those from `begin` up to `end` of all pictures of all sources, in their order."""

    begin: int
    end: int
    start: Position
    stop: Position


def share_of(sources: Sequence[Source], number: int, of: int) -> ImageShare:
    """What part `number` of `of` parts reads."""
    counts = [len(source.items()) for source in sources]
    begin, end = (sum(counts) * part // of for part in (number - 1, number))
    return ImageShare(begin, end, _position(counts, begin), _position(counts, end))


def _position(counts: Sequence[int], place: int) -> Position:
    """Of a picture of all."""
    for source, count in enumerate(counts):
        if place < count:
            return Position(source=source, offset=place)
        place -= count
    return Position(source=len(counts))


class ImageParts(Parts):
    """The folder OUT/parts of a preparation of pictures."""

    kind = "images"
    verb = "matmix prepare-images"

    def begin(self, wanted: dict[str, Any], sources: Sequence[Source], arguments: list[str], of: int) -> None:
        """Says what is prepared, if this is the first of the parts. wanted: the fingerprint of the whole. Raises
        ValueError if OUT holds anything but parts of this preparation."""
        self._check_free()
        self.folder.mkdir(parents=True, exist_ok=True)

        def begun() -> dict[str, Any]:
            return {
                "options": wanted,
                "parts": of,
                "pictures": sum(len(source.items()) for source in sources),
                "names": [source.name for source in sources],
                "arguments": arguments,
            }

        self._write_once("options.json", "begins with the parts", begun, indent=1)
        self._check_same(wanted)
        self._check_number(of, self.facts()["parts"])

    def facts(self) -> dict[str, Any]:
        return self._read("options.json", _check_facts)


def _check_facts(raw: dict[str, Any]) -> None:
    numbers = [raw["parts"], raw["pictures"]]
    texts = [*raw["names"], *raw["arguments"], raw["options"]["format"], raw["options"]["compression"]]
    digests = [*raw["options"]["inputs"], *raw["options"]["validation"]]
    fine = all(type(number) is int and number >= 0 for number in numbers) and raw["parts"] >= 1
    fine = fine and all(isinstance(text, str) for text in (*texts, *raw["options"]["classes"]))
    if not fine or len(digests) != len(raw["names"]) or not all(len(entry) == 3 for entry in digests):
        raise ValueError("it lacks a key, or a value is of another kind")


def write_part(folder: Path, share: ImageShare, statistics: Statistics) -> None:
    """Writes the part.json of a part whose shards are written."""
    found = {"begin": share.begin, "end": share.end, "statistics": statistics.values.tolist()}
    write_atomic(folder / PART_NAME, json.dumps(found).encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part(FinishedPart):
    begin: int
    end: int
    statistics: np.ndarray
    """As `Statistics.values`."""


def merge_images(out: str, *, dry_run: bool = False, max_corrupt: float = 0.01) -> Manifest | None:
    """Joins the parts of a preparation in the folder `out` into one dataset; None for a dry run.

    Args:
        dry_run: only show the state of the parts, and check those that are finished.
        max_corrupt: share of all pictures that may be corrupt.

    Raises FileNotFoundError if there are no parts, and ValueError (one line) if some are missing, are not of the same
    preparation, or do not hold every picture exactly once; nothing is changed then. A merge that was stopped is
    finished by the same command.
    """
    refuse_secrets(out, "prepare-images: out")
    parts = ImageParts(out)
    if (parts.out / MANIFEST_NAME).exists():
        manifest = Manifest.load(parts.out)
        shutil.rmtree(parts.folder, ignore_errors=True)
        print_summary(manifest, parts.out, "earlier: nothing to do")
        return manifest
    facts = parts.facts()
    options, of = facts["options"], facts["parts"]
    if not all_made(parts, of, facts["arguments"], dry_run=dry_run, unit="pictures"):
        return None
    with locked(parts.folder, BUSY.format(parts.folder)):
        found = [_check_part(parts, number, facts) for number in range(1, of + 1)]
        _check_tiling(found, facts)
        shard_format = make_format(options, PICTURES.name)
        shards, moves = plan_moves(parts, found, shard_format)
        splits = {
            name: SplitInfo.of(shards[name], sum(part.manifest.splits[name].bytes for part in found)) for name in shards
        }
        progress, statistics = _add_up(found, len(options["classes"]), len(shards))
        check_corrupt(progress, max_corrupt)
        check_splits(splits, options["validation_fraction"])
        if dry_run:
            print("all parts are finished and fit together: they can be joined", flush=True)
            return None
        write_splits(parts, found, shard_format, shards)
        move_shards(parts, shards, moves)
        images = statistics.info(tuple(options["classes"]), list(shards), options["background"])
        manifest = write_manifest(parts.out, options, facts["names"], shard_format, splits, progress, images)
    shutil.rmtree(parts.folder, ignore_errors=True)
    print_summary(manifest, parts.out, f"from {of} parts")
    return manifest


@errors_in_one_line(KeyError, TypeError, IndexError, AttributeError)
def _check_part(parts: ImageParts, number: int, facts: dict[str, Any]) -> _Part:
    """Part `number`. Raises ValueError unless it is of this preparation, and says the same number of pictures
    everywhere."""
    folder = parts.part(number, facts["parts"])
    manifest = Manifest.load(folder)
    try:
        raw = parse_json((folder / PART_NAME).read_bytes(), PART_NAME)
        statistics = Statistics(len(facts["options"]["classes"]), len(manifest.splits))
        values = np.array(raw["statistics"], dtype=np.int64)
        if values.shape != statistics.values.shape or not all(type(raw[name]) is int for name in ("begin", "end")):
            raise ValueError("its numbers are none")
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{folder / PART_NAME} is missing or damaged ({one_line(error)}); delete {folder}") from None
    part = _Part(folder=folder, manifest=manifest, begin=raw["begin"], end=raw["end"], statistics=values)
    compare_preparations(folder, manifest.options, {**facts["options"], "part": f"{number}/{facts['parts']}"})
    part.check_files()
    counts = {
        "part.json": part.end - part.begin - manifest.malformed["count"],
        "the manifest": sum(split.documents for split in manifest.splits.values()),
        "its classes": sum(map(sum, manifest.images.counts.values())),
        "lengths.npy": sum(len(part.lengths(name)) for name in manifest.splits),
    }
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise ValueError(f"{folder} does not agree with itself on its number of pictures ({said}); {part.again}")
    return part


def _check_tiling(found: Sequence[_Part], facts: dict[str, Any]) -> None:
    """Raises ValueError unless the parts hold every picture once."""
    begins, ends = [part.begin for part in found], [part.end for part in found]
    if [*begins, facts["pictures"]] != [0, *ends]:
        wrong = next(part for part, end in zip(found, [0, *ends], strict=False) if part.begin != end)
        raise ValueError(f"{wrong.folder} does not begin where the part before it ends; {wrong.again}")


def _add_up(found: Sequence[_Part], classes: int, splits: int) -> tuple[Progress, Statistics]:
    """What all parts have met, and the sums over their pictures."""
    total, statistics = Progress(), Statistics(classes, splits)
    for part in found:
        met = part.manifest.malformed
        total.examples += met["examples"][: KEPT_EXAMPLES - len(total.examples)]
        total.records += met["records"]
        total.malformed += met["count"]
        statistics.join(part.statistics)
    return total, statistics
