"""Says how far a preparation is and what came out, refuses one that cannot be used, and writes the manifest."""

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from matmix.data.artifacts import shell_line
from matmix.data.formats.base import ShardFormat
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.base import BrokenInputError, Preparation, Progress
from matmix.data.storage.files import sha256_of, write_atomic

logger = logging.getLogger(__name__)

Kind = type[Preparation]

_SECONDS_BETWEEN_LINES = 10.0


class Report(AbstractContextManager):
    """Shows on stderr how far something is: by a bar on a terminal, by a line now and then elsewhere."""

    def __init__(self, label: str, total_bytes: int | None = None, *, unit: str = "tokens", made: int = 0) -> None:
        """total_bytes: of the input; None: the end is not known. made: units that were made before."""
        self.label, self.total, self.unit, self._first = label, total_bytes, unit, made
        self._started = self._last = time.monotonic()
        style = {"total": total_bytes, "unit": "B", "unit_scale": True}
        style = {"bar_format": "{desc}: {elapsed}"} if total_bytes is None else style
        self._bar = tqdm(desc=label, dynamic_ncols=True, leave=False, **style) if sys.stderr.isatty() else None

    def update(self, done_bytes: int = 0, made: int = 0) -> None:
        """Shows the state. done_bytes, made: from the beginning of the whole work on."""
        now = time.monotonic()
        seconds = now - self._started
        words = f"{seconds:.0f} s so far"
        if self.total is not None:
            speed = (made - self._first) / max(seconds, 1e-9)
            words = f"{made:,} {self.unit}, {speed:,.0f} {self.unit}/s"
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update(done_bytes - self._bar.n)
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            share = "" if self.total is None else f"{100 * done_bytes / max(1, self.total):.0f} %, "
            logger.info(f"{self.label}: {share}{words}")

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def check_broken(kind: Kind, met: Progress, most: float) -> None:
    """Raises BrokenInputError if more than the share `most` of the records is broken."""
    if met.malformed > most * met.records:
        shown = "; ".join(kind.broken_record.format(**example) for example in met.examples[:3])
        raise BrokenInputError(
            f"{met.malformed:,} of {met.records:,} {kind.record} are {kind.broken} ({shown}); {kind.advice(met)}mend "
            f"or remove them, or allow a larger share with --{kind.most_broken.replace('_', '-')}"
        )


def empty_split(kind: Kind, name: str, documents: int, fraction: float) -> ValueError:
    """Returns the error for a split that gets none of so many documents."""
    hint = f" at a validation fraction of {fraction}; change the fraction{kind.split_advice}" if fraction else ""
    return ValueError(f"the {name} split got none of the {documents:,} {kind.unit}{hint}")


def empty_input(kind: Kind, names: Sequence[str]) -> ValueError:
    """Returns the error for sources that give no document."""
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    return ValueError(f"the corpus is empty: there is no {kind.content} in {where}")


@dataclass(frozen=True)
class Prepared:
    """All that was prepared, whose shards lie in `out`. options: the fingerprint. names: of the sources."""

    kind: Kind
    out: Path
    options: dict[str, Any]
    names: Sequence[str]
    format: ShardFormat
    splits: dict[str, SplitInfo]
    progress: Progress
    sums: np.ndarray

    def check(self, most_broken: float) -> None:
        """Raises ValueError if a larger share of the records is broken, or a split has no documents."""
        check_broken(self.kind, self.progress, most_broken)
        total = sum(split.documents for split in self.splits.values())
        if not total:
            raise empty_input(self.kind, self.names)
        for name, split in self.splits.items():
            if not split.documents:
                raise empty_split(self.kind, name, total, self.options["validation_fraction"])

    def write_manifest(self, files: Sequence[str] = ()) -> Manifest:
        """Completes the dataset. files: further ones whose digests the manifest gets."""
        by_source = [0] * len(self.names)
        for source, *_, documents in self.progress.spans:
            by_source[source] += documents
        own = self.kind.finish(self.out, self.options, list(self.splits), self.sums)
        histogram = [name for name in [own.get("token_histogram")] if name]
        files = [
            *histogram,
            *files,
            *(f"{split}/{name}" for split in self.splits for name in ("lengths.npy", "index.json")),
        ]
        inputs = [*self.options["inputs"], *self.options.get("validation", ())]
        met = self.progress
        manifest = Manifest(
            format=self.options["format"],
            compression=self.format.compression,
            dtype=self.format.dtype.name,
            splits=self.splits,
            sources=tuple(
                {"path": name, "bytes": size, "digest": digest, "documents": documents}
                for name, (_, size, digest), documents in zip(self.names, inputs, by_source, strict=True)
            ),
            malformed={"count": met.malformed, "records": met.records, "examples": met.examples},
            empty_documents=met.empty,
            options=self.options,
            files={name: sha256_of(self.out / name) for name in files},
            **own,
        )
        write_atomic(self.out / MANIFEST_NAME, manifest.to_json().encode())
        return manifest


def print_summary(kind: Kind, manifest: Manifest, out: Path | str, when: str) -> None:
    """Says on stdout what a dataset holds and what to do with it."""
    lines = [f"prepared {out} ({manifest.format}, {manifest.compression or 'not compressed'}) {when}"]
    for name, split in manifest.splits.items():
        shards = "1 shard" if len(split.shards) == 1 else f"{len(split.shards):,} shards"
        lines.append(f"  {name:<11} {split.documents:,} {kind.unit}, {kind.amount(split)}, {shards}")
    lines += [f"  {title:<11} {text}" for title, text in kind.summary(manifest)]
    bad = manifest.malformed
    if bad["count"]:
        lines.append(f"  {kind.broken:<11} {bad['count']:,} of {bad['records']:,} {kind.record} were left out:")
        lines += [f"              {kind.broken_record.format(**example)}" for example in bad["examples"][:5]]
    if manifest.empty_documents:
        lines.append(f"  empty       {manifest.empty_documents:,} {kind.unit} without {kind.content} were left out")
    step = f"next: {kind.next_step(manifest, out)}"
    if "part" in manifest.options:
        merge = shell_line(*kind.verb.split(), "--merge", "--out", Path(out).parent.parent)
        step = f"next, when all parts are finished: {merge}"
    print(*lines, step, sep="\n", flush=True)
