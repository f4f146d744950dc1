"""What is said of a preparation: that it cannot be used, its manifest, and a few lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import shell_line
from matmix.data.formats.base import ShardFormat
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo, TokenizerInfo, unigram_entropy
from matmix.data.prepare.sources import Source
from matmix.data.prepare.workspace import HISTOGRAM_NAME, Progress, read_histogram
from matmix.data.splits.writer import SplitWriter
from matmix.data.storage.files import sha256_of, write_atomic
from matmix.data.tokenizer import Tokenizer


class MalformedError(ValueError):
    """Too large a share of the input is malformed. The work done is kept: a larger share may be allowed."""


def check_malformed(met: Progress, most: float) -> None:
    """Raises MalformedError if more than the share `most` of the records is malformed."""
    if met.malformed > most * met.records:
        shown = "; ".join(f"{e['file']}, line {e['line']}: {e['reason']}" for e in met.examples[:3])
        reasons = [e["reason"] for e in met.examples[:3]]
        advice = ""
        if any(reason.startswith("no field") for reason in reasons):
            advice = "name the field of the text with --text-field, "
        elif met.malformed == met.records and any(reason.startswith("not ") for reason in reasons):
            advice = "give one object a line (jq -c '.[]' FILE makes them of a JSON array), "
        raise MalformedError(
            f"{met.malformed:,} of {met.records:,} lines are malformed ({shown}); {advice}mend them, or allow a larger "
            f"share with --max-malformed"
        )


def check_splits(
    splits: Mapping[str, SplitInfo | SplitWriter], sources: Sequence[Source], validation_fraction: float
) -> None:
    """Raises ValueError if a split has no documents."""
    if not (total := sum(split.documents for split in splits.values())):
        raise ValueError(empty_sentence(sources))
    for name, split in splits.items():
        if not split.documents:
            raise empty_split(name, total, validation_fraction)


def empty_split(name: str, documents: int, validation_fraction: float) -> ValueError:
    """The error for a split without documents, of so many in all."""
    return ValueError(
        f"the {name} split got none of the {documents:,} documents at a validation fraction of "
        f"{validation_fraction}; change the fraction, or cut documents with --max-document-chars"
    )


def empty_sentence(sources: Sequence[Source]) -> str:
    where = sources[0].name if len(sources) == 1 else f"{len(sources)} files"
    return f"the corpus is empty: there is no text in {where}"


def write_manifest(
    out: Path,
    options: dict[str, Any],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    shard_format: ShardFormat,
    splits: dict[str, SplitInfo],
    progress: Progress,
) -> Manifest:
    """Complete the dataset whose other files lie in `out`. options: what `fingerprint` gave."""
    by_source = [0] * len(sources)
    for source, *_, documents in progress.spans:
        by_source[source] += documents
    names = [HISTOGRAM_NAME, *(f"{split}/{name}" for split in splits for name in ("lengths.npy", "index.json"))]
    manifest = Manifest(
        format=options["format"],
        compression=shard_format.compression,
        dtype=shard_format.dtype.name,
        tokenizer=TokenizerInfo(
            kind=tokenizer.kind,
            file=f"tokenizer/{tokenizer.file_name}",
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            special=tokenizer.special,
        ),
        splits=splits,
        token_histogram=HISTOGRAM_NAME,
        unigram_entropy=unigram_entropy(read_histogram(out, tokenizer.vocab_size)),
        sources=tuple(
            {"path": s.name, "bytes": s.bytes, "digest": digest, "documents": documents}
            for s, (_, _, digest), documents in zip(sources, options["inputs"], by_source, strict=True)
        ),
        malformed={"count": progress.malformed, "records": progress.records, "examples": progress.examples},
        empty_documents=progress.empty,
        options=options,
        files={name: sha256_of(out / name) for name in names},
    )
    write_atomic(out / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


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
    step = f"next: {shell_line('matmix', 'train', 'RECIPE.toml', '--data.path', out)}"
    if "part" in manifest.options:
        merge = shell_line("matmix", "prepare", "--merge", "--out", Path(out).parent.parent)
        step = f"next, when all parts are finished: {merge}"
    print(*lines, step, sep="\n", flush=True)
