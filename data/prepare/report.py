"""What is said of a finished preparation: the manifest, and a few lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from matmix.data.formats.split_writer import SplitWriter
from matmix.data.manifest import Manifest, SplitInfo, TokenizerInfo, unigram_entropy
from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.sources import Source
from matmix.data.prepare.state import HISTOGRAM_NAME, Progress, Workspace
from matmix.data.storage.files import sha256_of
from matmix.data.tokenizer import Tokenizer


def make_manifest(
    config: PrepareConfig,
    sources: Sequence[Source],
    workspace: Workspace,
    tokenizer: Tokenizer,
    writers: dict[str, SplitWriter],
    histogram: np.ndarray,
    progress: Progress,
) -> Manifest:
    """What is written last."""
    by_source = progress.documents_by_source + [0] * len(sources)
    digests = [entry[2] for entry in workspace.wanted["inputs"]]
    splits = {}
    for name, writer in writers.items():
        shards = tuple(shard.info for shard in writer.shards)
        splits[name] = SplitInfo(
            documents=writer.documents, tokens=writer.tokens, bytes=writer.text_bytes, shards=shards
        )
    return Manifest(
        format=config.format,
        compression=None if config.compression == "none" else "zstd",
        dtype=writers["train"].format.dtype.name,
        tokenizer=TokenizerInfo(
            kind=tokenizer.kind,
            file=f"tokenizer/{tokenizer.file_name}",
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            special=tokenizer.special,
        ),
        splits=splits,
        token_histogram=HISTOGRAM_NAME,
        unigram_entropy=unigram_entropy(histogram),
        sources=tuple(
            {"path": s.name, "bytes": s.bytes, "digest": digest, "documents": documents}
            for s, digest, documents in zip(sources, digests, by_source, strict=False)
        ),
        malformed={
            "count": progress.malformed,
            "records": progress.records,
            "examples": progress.examples,
        },
        empty_documents=progress.empty,
        options=workspace.wanted,
        files=small_files(workspace.out, splits),
    )


def small_files(out: Path, splits: Iterable[str]) -> dict[str, str]:
    """Hex digests of what lies beside the shards, by their paths in the dataset."""
    names = [HISTOGRAM_NAME, *(f"{split}/{name}" for split in splits for name in ("lengths.npy", "index.json"))]
    return {name: sha256_of(out / name) for name in names}


def print_summary(manifest: Manifest, out: Path | str, when: str) -> None:
    """Say on stdout what a dataset holds and what to do with it."""
    kind = f"{manifest.format}, {manifest.compression or 'not compressed'}"
    lines = [f"prepared {out} ({kind}) {when}"]
    for name, split in manifest.splits.items():
        shards = "1 shard" if len(split.shards) == 1 else f"{len(split.shards):,} shards"
        lines.append(f"  {name:<11} {split.documents:,} documents, {split.tokens:,} tokens, {shards}")
    tokenizer, train = manifest.tokenizer, manifest.splits["train"]
    lines.append(
        f"  tokenizer   {tokenizer.kind}, {tokenizer.vocab_size:,} ids, "
        f"{train.bytes / max(1, train.tokens):.2f} bytes a token; "
        f"entropy of single tokens {manifest.unigram_entropy:.3f} nats"
    )
    bad = manifest.malformed
    if bad["count"]:
        lines.append(f"  malformed   {bad['count']:,} of {bad['records']:,} lines were left out:")
        lines += [f"              {e['file']}, line {e['line']}: {e['reason']}" for e in bad["examples"][:5]]
    if manifest.empty_documents:
        lines.append(f"  empty       {manifest.empty_documents:,} documents without text were left out")
    if "part" in manifest.options:
        lines.append(f"next, when all parts are finished: matmix prepare --merge --out {Path(out).parent.parent}")
    else:
        lines.append(f"next: matmix train RECIPE.toml --data.path {out}")
    print("\n".join(lines), flush=True)
