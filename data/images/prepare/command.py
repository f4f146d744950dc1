"""Files of pictures to a dataset of shards: `prepare_images`.

One process lists the pictures and writes the shards, others read and decode them. What comes out depends on the files
and the options, not on the number of processes nor on how often the work was stopped and taken up again.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.formats import make_format
from matmix.data.formats.base import PICTURES
from matmix.data.images.prepare.base import Chunk, Source
from matmix.data.images.prepare.config import PrepareImagesConfig
from matmix.data.images.prepare.parts import ImageParts, ImageShare, share_of, write_part
from matmix.data.images.prepare.report import (
    CorruptError,
    check_corrupt,
    check_splits,
    print_summary,
    write_manifest,
)
from matmix.data.images.prepare.sources import Classes, find_sources
from matmix.data.images.prepare.statistics import Statistics
from matmix.data.images.prepare.worker import Done, begin
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.pool import work_in_order
from matmix.data.prepare.sources import Position
from matmix.data.prepare.upload import make_at_url
from matmix.data.prepare.workspace import KEPT_EXAMPLES, SPLITS, Progress, Workspace
from matmix.data.processes import cores
from matmix.data.progress import ProgressReport
from matmix.data.splits.writer import SplitWriter
from matmix.data.storage.remote import is_url

logger = logging.getLogger(__name__)

# Raise it when the same options give other bytes than before.
CONTENTS_VERSION = 1
STATE_SECONDS = 5.0
STATE_SHARE = 0.05
# So many pictures without a single good one: something else is wrong with them than a few bad files.
HOPELESS_PICTURES = 1000


def prepare_images(config: PrepareImagesConfig) -> Manifest:
    """Write the dataset that `config` describes (or its part `config.part`), or go on with it, and say what came out;
    `config.out` may be a URL, but not of parts.

    Progress goes to stderr, the summary to stdout. A complete dataset of the same options is left as it is.

    Raises FileNotFoundError and ValueError (one line each) for what a user can mend; nothing that was there before is
    touched then. Raises RuntimeError if a decoding process was killed.
    """
    if is_url(config.out) and config.part:
        raise ValueError(f"parts are made in a folder that all machines share, not at a URL such as {config.out}")
    job = _Job(config)
    if is_url(config.out):
        return make_at_url(config.out, job.wanted, lambda folder: job.make(folder)[0], print_summary)
    manifest, when = job.make(config.out)
    print_summary(manifest, Path(config.out).expanduser(), when)
    return manifest


class _Job:
    """What is to be prepared."""

    def __init__(self, config: PrepareImagesConfig) -> None:
        self.config = config
        self.sources = find_sources(config.sources, config)
        self.held_out = find_sources(config.validation, config) if config.validation else []
        self.classes = Classes.find(self.sources, config.classes)
        digests = [[[Path(s.name).name, s.bytes, s.digest()] for s in part] for part in (self.sources, self.held_out)]
        self.wanted: dict[str, Any] = {
            **config.of_contents,
            "kind": "images",
            "inputs": digests[0],
            "validation": digests[1],
            "classes": list(self.classes.names),
            "contents_version": CONTENTS_VERSION,
        }

    @property
    def all_sources(self) -> list[Source]:
        return [*self.sources, *self.held_out]

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.held_out or self.config.validation_fraction else SPLITS[:1]

    def make(self, out: str) -> tuple[Manifest, str]:
        """The dataset in the folder `out`, and when it was made."""
        workspace, when = Workspace(out, self.wanted), "earlier, with the same input and options: nothing to do"
        share = None
        if self.config.share is not None and not (workspace.out / MANIFEST_NAME).exists():
            parts, (number, of) = ImageParts(out), self.config.share
            parts.begin(self.wanted, self.all_sources, self.config.arguments(), of)
            share = share_of(self.all_sources, number, of)
            workspace = Workspace(str(parts.part(number, of)), {**self.wanted, "part": self.config.part})
        status = workspace.check()
        if status != "finished":
            started = time.monotonic()
            if workspace.fill(lambda: self._write(workspace, share), is_new=status == "new", kept=CorruptError):
                when = f"in {time.monotonic() - started:.0f} s"
        manifest = Manifest.load(workspace.out)
        workspace.clear_work()
        return manifest, when

    def _write(self, workspace: Workspace, share: ImageShare | None) -> None:
        """All shards (of a share of the pictures) and everything else, the manifest last."""
        config = self.config
        prefix = f"{config.share[0]:05}-" if share else ""
        shard_format = make_format(workspace.wanted, PICTURES.name, prefix=prefix)
        writers = {name: SplitWriter(shard_format, workspace.out / name, workspace.work / name) for name in self.splits}
        statistics = Statistics(len(self.classes.names), len(self.splits))
        start, stop = (share.start, share.stop) if share else (Position(), Position(source=len(self.all_sources)))
        progress = workspace.restore(writers, statistics.values, start)
        if progress.records:
            logger.info(f"continuing after {progress.records:,} pictures")
        sizes = [source.bytes for source in self.all_sources]
        processes = config.processes or min(cores(), 1 + sum(sizes) // (1 << 22))
        chunks = self._chunks(progress.position, stop)
        saved, pause, hopeless = time.monotonic(), STATE_SECONDS, False
        with (
            ProgressReport(sum(sizes), tokens=progress.records, label="preparing", unit="pictures") as report,
            closing(work_in_order(chunks, processes, functools.partial(begin, config), doing="decoding")) as results,
        ):
            for chunk, done in results:
                self._add(chunk, done, writers, statistics, progress)
                before = sum(sizes[: chunk.start.source])
                report.update(int(before + chunk.done * sizes[chunk.start.source]), progress.records)
                if hopeless := progress.malformed == progress.records >= HOPELESS_PICTURES:
                    break
                if (now := time.monotonic()) - saved >= pause:
                    workspace.save(progress, writers, statistics.values)
                    saved = time.monotonic()
                    pause = max(STATE_SECONDS, (saved - now) / STATE_SHARE)
        workspace.save(progress, writers, statistics.values)
        if share is None:
            check_corrupt(progress, config.max_corrupt)
            check_splits(writers, config.validation_fraction)
        elif hopeless:
            check_corrupt(progress, 0)
        for writer in writers.values():
            writer.finish()
        splits = {name: SplitInfo.of(writer.shards, writer.text_bytes) for name, writer in writers.items()}
        images = statistics.info(self.classes.names, list(self.splits), config.background)
        if share:
            write_part(workspace.out, share, statistics)
        names = [source.name for source in self.all_sources]
        write_manifest(workspace.out, workspace.wanted, names, shard_format, splits, progress, images)

    def _chunks(self, position: Position, stop: Position) -> Iterator[Chunk]:
        """What is left to do from a position on, up to `stop`."""
        everything = self.all_sources
        held_out: bool | None = False if self.held_out or not self.config.validation_fraction else None
        for number in range(position.source, min(stop.source + 1, len(everything))):
            source = everything[number]
            items = source.ordered()
            last = stop.offset if number == stop.source else len(items)
            first = position.offset if number == position.source else 0
            for begins in range(first, last, source.chunk):
                some = items[begins : min(begins + source.chunk, last)]
                ends = begins + len(some)
                yield Chunk(
                    source=source,
                    items=some,
                    labels=self._numbers(source, some),
                    validation=True if number >= len(self.sources) else held_out,
                    start=Position(source=number, offset=begins),
                    end=Position(source=number, offset=ends),
                    done=ends / len(items),
                )

    def _numbers(self, source: Source, items: Sequence[Any]) -> np.ndarray:
        numbers = (self.classes.number(item.label, f"{source.name}: {item.name}") for item in items)
        return np.fromiter(numbers, np.int64, len(items))

    def _add(
        self,
        chunk: Chunk,
        done: Sequence[Done],
        writers: dict[str, SplitWriter],
        statistics: Statistics,
        progress: Progress,
    ) -> None:
        for place, one in enumerate(done, start=chunk.start.offset + 1):
            progress.records += 1
            if one.document is None:
                progress.malformed += 1
                if len(progress.examples) < KEPT_EXAMPLES:
                    progress.examples.append({"file": chunk.source.name, "line": place, "reason": one.reason})
                continue
            split = int(one.validation)
            writers[SPLITS[split]].write(one.document, len(one.document))
            statistics.count(split, one.label)
            if not split:
                statistics.add(one.statistics)
        progress.position = replace(chunk.end)
