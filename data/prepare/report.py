"""Refuses a preparation that cannot be used, writes the manifest of one that can, and says what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.artifacts import shell_line
from matmix.data.formats.base import ShardFormat
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.base import BrokenInputError, Preparation, Progress
from matmix.data.splits.writer import SplitWriter
from matmix.data.storage.files import sha256_of, write_atomic

Kind = type[Preparation]


def check_broken(kind: Kind, met: Progress, most: float) -> None:
    """Raises BrokenInputError if more than the share `most` of the records is broken."""
    if met.malformed > most * met.records:
        shown = "; ".join(kind.shown(example) for example in met.examples[:3])
        raise BrokenInputError(
            f"{met.malformed:,} of {met.records:,} {kind.record} are {kind.broken} ({shown}); {kind.advice(met)}mend "
            f"or remove them, or allow a larger share with --{kind.most_broken.replace('_', '-')}"
        )


def check_splits(
    kind: Kind, splits: Mapping[str, SplitInfo | SplitWriter], names: Sequence[str], fraction: float
) -> None:
    """Raises ValueError if a split has no documents. names: of the sources."""
    total = sum(split.documents for split in splits.values())
    if not total:
        raise empty_input(kind, names)
    for name, split in splits.items():
        if not split.documents:
            raise empty_split(kind, name, total, fraction)


def empty_split(kind: Kind, name: str, documents: int, fraction: float) -> ValueError:
    """Returns the error for a split that gets none of so many documents."""
    hint = f" at a validation fraction of {fraction}; change the fraction{kind.split_advice}" if fraction else ""
    return ValueError(f"the {name} split got none of the {documents:,} {kind.unit}{hint}")


def empty_input(kind: Kind, names: Sequence[str]) -> ValueError:
    """Returns the error for sources that give no document."""
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    return ValueError(f"the corpus is empty: there is no {kind.content} in {where}")


def write_manifest(
    kind: Kind,
    out: Path,
    options: dict[str, Any],
    names: Sequence[str],
    shard_format: ShardFormat,
    splits: dict[str, SplitInfo],
    progress: Progress,
    sums: np.ndarray,
    files: Sequence[str] = (),
) -> Manifest:
    """Completes the dataset whose shards lie in `out`.

    options: the fingerprint of the preparation. names: of the sources. sums: those of `Preparation.add` over all
    documents. files: further files, whose digests the manifest gets.
    """
    by_source = [0] * len(names)
    for source, *_, documents in progress.spans:
        by_source[source] += documents
    own = kind.finish(out, options, list(splits), sums)
    if histogram := own.get("token_histogram"):
        files = [histogram, *files]
    files = [*files, *(f"{split}/{name}" for split in splits for name in ("lengths.npy", "index.json"))]
    inputs = [*options["inputs"], *options.get("validation", ())]
    manifest = Manifest(
        format=options["format"],
        compression=shard_format.compression,
        dtype=shard_format.dtype.name,
        splits=splits,
        sources=tuple(
            {"path": name, "bytes": size, "digest": digest, "documents": documents}
            for name, (_, size, digest), documents in zip(names, inputs, by_source, strict=True)
        ),
        malformed={"count": progress.malformed, "records": progress.records, "examples": progress.examples},
        empty_documents=progress.empty,
        options=options,
        files={name: sha256_of(out / name) for name in files},
        **own,
    )
    write_atomic(out / MANIFEST_NAME, manifest.to_json().encode())
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
        lines += [f"              {kind.shown(example)}" for example in bad["examples"][:5]]
    if manifest.empty_documents:
        lines.append(f"  empty       {manifest.empty_documents:,} {kind.unit} without {kind.content} were left out")
    step = f"next: {kind.next_step(manifest, out)}"
    if "part" in manifest.options:
        merge = shell_line(*kind.verb.split(), "--merge", "--out", Path(out).parent.parent)
        step = f"next, when all parts are finished: {merge}"
    print(*lines, step, sep="\n", flush=True)
