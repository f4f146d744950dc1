"""What is said of a preparation of pictures: that it cannot be used, its manifest, and a few lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import shell_line
from matmix.data.formats.base import ShardFormat
from matmix.data.manifest import MANIFEST_NAME, ImagesInfo, Manifest, SplitInfo
from matmix.data.prepare.workspace import Progress
from matmix.data.splits.writer import SplitWriter
from matmix.data.storage.files import sha256_of, write_atomic


class CorruptError(ValueError):
    """Too large a share of the pictures is corrupt. The work done is kept: a larger share may be allowed."""


def check_corrupt(met: Progress, most: float) -> None:
    """Raises CorruptError if more than the share `most` of the pictures is corrupt."""
    if met.malformed > most * met.records:
        shown = "; ".join(_shown(example) for example in met.examples[:3])
        raise CorruptError(
            f"{met.malformed:,} of {met.records:,} pictures are corrupt ({shown}); mend or remove them, or allow a "
            "larger share with --max-corrupt"
        )


def check_splits(splits: Mapping[str, SplitWriter], fraction: float) -> None:
    """Raises ValueError if a split has no pictures."""
    total = sum(split.documents for split in splits.values())
    for name, split in splits.items():
        if not split.documents:
            hint = f" at a validation fraction of {fraction}; change the fraction" if fraction else ""
            raise ValueError(f"the {name} split got none of the {total:,} pictures{hint}")


def write_manifest(
    out: Path,
    options: dict[str, Any],
    names: Sequence[str],
    shard_format: ShardFormat,
    splits: dict[str, SplitInfo],
    progress: Progress,
    images: ImagesInfo,
) -> Manifest:
    """Complete the dataset whose other files lie in `out`. options: what makes two preparations the same; names: of the
    sources."""
    files = [f"{split}/{name}" for split in splits for name in ("lengths.npy", "index.json")]
    digests = [*options["inputs"], *options["validation"]]
    manifest = Manifest(
        format=options["format"],
        compression=shard_format.compression,
        dtype=shard_format.dtype.name,
        splits=splits,
        sources=tuple(
            {"path": name, "bytes": size, "digest": digest}
            for name, (_, size, digest) in zip(names, digests, strict=True)
        ),
        malformed={"count": progress.malformed, "records": progress.records, "examples": progress.examples},
        empty_documents=0,
        images=images,
        options=options,
        files={name: sha256_of(out / name) for name in files},
    )
    write_atomic(out / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def print_summary(manifest: Manifest, out: Path | str, when: str) -> None:
    """Say on stdout what a dataset holds and what to do with it."""
    images, bad = manifest.images, manifest.malformed
    part = manifest.options.get("part")
    what = f"part {part} of {out}" if part else out
    lines = [f"prepared {what} ({manifest.format}, {manifest.compression or 'not compressed'}) {when}"]
    for name, split in manifest.splits.items():
        shards = "1 shard" if len(split.shards) == 1 else f"{len(split.shards):,} shards"
        lines.append(f"  {name:<11} {split.documents:,} pictures, {split.tokens / 1e6:,.1f} MB, {shards}")
    counts = images.counts["train"]
    shown = ", ".join(images.classes[:6]) + (", ..." if len(images.classes) > 6 else "")
    lines.append(f"  classes     {len(images.classes):,} ({shown}), {min(counts):,} to {max(counts):,} pictures each")
    sizes = [f"{side} {least} to {most}" for side, (least, _, most) in _sides(images)]
    lines.append(f"  pixels      {', '.join(sizes)}; mean {_numbers(images.mean)}, spread {_numbers(images.std)}")
    if bad["count"]:
        lines.append(f"  corrupt     {bad['count']:,} of {bad['records']:,} pictures were left out:")
        lines += [f"              {_shown(example)}" for example in bad["examples"][:5]]
    if part:
        merge = shell_line("matmix", "prepare-images", "--merge", "--out", out)
        step = f"next: the other parts of {part.partition('/')[2]}, then {merge}"
        print(*lines, step, sep="\n", flush=True)
        return
    words = ["matmix", "train", "RECIPE.toml", "--data.images.path", out]
    if len(manifest.splits) == 1:
        lines.append("  validation  none: --validation or --validation-fraction makes one")
        words += ["--data.images.validation-path", "ANOTHER_DATASET"]
    print(*lines, f"next: {shell_line(*words)}", sep="\n", flush=True)


def _sides(images: ImagesInfo) -> list[tuple[str, tuple[int, float, int]]]:
    return [("width", images.width), ("height", images.height)]


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values[:3])


def _shown(example: dict[str, Any]) -> str:
    return f"{example['file']}: {example['reason']}"
