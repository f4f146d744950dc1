"""Text files to a dataset of token shards: `prepare`.

    matmix prepare --inputs bundled:shakespeare --out datasets/shakespeare --vocab-size 4096
    --max-document-chars 2000

One process reads the files in order and writes the shards, others tokenise. What comes out depends on the
text and on the options, not on the number of processes nor on how often the work was stopped and taken up
again.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.manifest import Manifest
from matmix.data.prepare_config import PrepareConfig
from matmix.data.prepare_pool import Tokenized, tokenize_in_order
from matmix.data.prepare_progress import ProgressReport, say
from matmix.data.prepare_report import make_manifest, print_summary
from matmix.data.prepare_sample import take_sample
from matmix.data.prepare_state import (
    HISTOGRAM_NAME,
    KEPT_EXAMPLES,
    SPLITS,
    Progress,
    Workspace,
    fingerprint,
)
from matmix.data.readers import Chunk, read_chunks
from matmix.data.sources import Source, find_sources
from matmix.data.tokenizer import Tokenizer, train_sentencepiece
from matmix.data.writers import MdsFormat, SplitWriter, WebDatasetFormat, write_atomic

__all__ = ["MalformedError", "PrepareConfig", "prepare"]

# How often the state is saved; what was done since is done again after a stop. A state holds up to a shard of
# each split, so it is saved more rarely where that would take more than the given share of the time.
STATE_SECONDS = 5.0
STATE_SHARE = 0.05
# So many records without a single good one: something else is wrong with them than a few bad lines.
HOPELESS_RECORDS = 1000


class MalformedError(ValueError):
    """Too large a share of the input is malformed. The work done is kept: a larger share may be allowed."""


def prepare(config: PrepareConfig) -> Manifest:
    """Write the dataset that `config` describes, or go on with it, and say what came out.

    Progress goes to stderr, a summary to stdout. A complete dataset of the same options is left as it is.

    Raises FileNotFoundError and ValueError (one line each) for what a user can mend; nothing that was there
    before is touched then. Raises RuntimeError if a tokenising process was killed.
    """
    started = time.monotonic()
    sources, ignored = find_sources(config.inputs)
    given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    workspace = Workspace(config.out, fingerprint(config, sources, given.sha256 if given else ""))
    status = workspace.check()
    if status == "finished":
        return _finished(workspace)
    if ignored:
        say(f"passed over {len(ignored)} files that are no .txt, .jsonl or .parquet, such as {ignored[0]}")
    copied = _copied_tokenizer(workspace) if status == "unfinished" else None
    with tempfile.TemporaryDirectory() as scratch:
        # Before the folder is made, so that an error in the input leaves none behind.
        tokenizer = copied or given or _train(config, sources, Path(scratch))
        workspace.open()
        try:
            if workspace.check() == "finished":
                return _finished(workspace)
            if _copied_tokenizer(workspace) is None:
                tokenizer.save(workspace.out / "tokenizer")
            manifest = _write(config, sources, workspace)
            workspace.finish(manifest)
        except MalformedError:
            raise
        except (ValueError, FileNotFoundError):
            # With other text or options this would be another preparation: nothing here could be used again.
            if status == "new":
                workspace.discard()
            raise
        except KeyboardInterrupt:
            say(f"stopped; run the same command again to continue in {workspace.out}")
            raise
        finally:
            workspace.close()
    print_summary(manifest, workspace.out, f"in {time.monotonic() - started:.0f} s")
    return manifest


def _finished(workspace: Workspace) -> Manifest:
    manifest = Manifest.load(workspace.out)
    workspace.clear_work()
    print_summary(manifest, workspace.out, "earlier, with the same input and options: nothing to do")
    return manifest


def _copied_tokenizer(workspace: Workspace) -> Tokenizer | None:
    for name in ("tokenizer.model", "tokenizer.json"):
        if (path := workspace.out / "tokenizer" / name).is_file():
            return Tokenizer.load(path)
    return None


def _train(config: PrepareConfig, sources: Sequence[Source], scratch: Path) -> Tokenizer:
    sample = take_sample(sources, config.read_options(), int(config.sample_megabytes * 1e6))
    if not sample.texts:
        if sample.malformed:
            raise MalformedError(_malformed_sentence(sample.malformed, sample.malformed, sample.examples))
        raise ValueError(_empty_sentence(sources))
    say(
        f"training a {config.model_type} tokenizer of {config.vocab_size:,} ids on "
        f"{sample.bytes / 1e6:.1f} MB of text from {len(sources)} {'file' if len(sources) == 1 else 'files'}"
    )
    return train_sentencepiece(
        sample.texts,
        scratch / "tokenizer.model",
        vocab_size=config.vocab_size,
        model_type=config.model_type,
        byte_fallback=config.byte_fallback,
        normalization=config.normalization,
        character_coverage=config.character_coverage,
    )


def _write(config: PrepareConfig, sources: Sequence[Source], workspace: Workspace) -> Manifest:
    """All shards and everything else but the manifest, which is returned."""
    tokenizer = _copied_tokenizer(workspace)
    assert tokenizer is not None
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    shard_format = (MdsFormat if config.format == "mds" else WebDatasetFormat)(
        dtype=dtype,
        compression=None if config.compression == "none" else "zstd",
        size_limit=int(config.shard_megabytes * (1 << 20)),
    )
    splits = SPLITS if config.validation_fraction else SPLITS[:1]
    writers = {name: SplitWriter(shard_format, workspace.out / name, workspace.work / name) for name in splits}
    histogram = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    progress = workspace.restore(writers, histogram)
    if progress.records:
        say(f"continuing after {sum(w.documents for w in writers.values()):,} documents")
    worker = (tokenizer.path, dtype, config.read_options(), config.validation_fraction)
    chunks = read_chunks(sources, config.read_options(), progress.position)
    bytes_before = np.cumsum([0, *(s.bytes for s in sources)])
    tokens = sum(w.tokens for w in writers.values())
    saved, pause = time.monotonic(), STATE_SECONDS
    with (
        ProgressReport(int(bytes_before[-1]), tokens=tokens) as report,
        closing(tokenize_in_order(chunks, _processes(config, sources), worker)) as results,
    ):
        for chunk, done in results:
            _add(chunk, done, writers, histogram, progress)
            report.update(
                int(bytes_before[chunk.start.source]) + chunk.disk_bytes,
                sum(w.tokens for w in writers.values()),
            )
            if progress.malformed == progress.records >= HOPELESS_RECORDS:
                break
            if (now := time.monotonic()) - saved >= pause:
                workspace.save(progress, writers, histogram)
                saved = time.monotonic()
                pause = max(STATE_SECONDS, (saved - now) / STATE_SHARE)
    _check_result(config, sources, writers, progress)
    workspace.save(progress, writers, histogram)
    for writer in writers.values():
        writer.finish()
    buffer = io.BytesIO()
    np.save(buffer, histogram, allow_pickle=False)
    write_atomic(workspace.out / HISTOGRAM_NAME, buffer.getvalue())
    return make_manifest(config, sources, workspace, tokenizer, writers, histogram, progress)


def _processes(config: PrepareConfig, sources: Sequence[Source]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.processes or min(cores, 1 + sum(s.bytes for s in sources) // (1 << 20))


def _add(
    chunk: Chunk,
    done: Tokenized,
    writers: dict[str, SplitWriter],
    histogram: np.ndarray,
    progress: Progress,
) -> None:
    documents = np.split(done.tokens, np.cumsum(done.lengths)[:-1]) if len(done.lengths) else []
    for tokens, size, is_validation in zip(documents, done.text_bytes, done.validation, strict=True):
        writers["validation" if is_validation else "train"].write(tokens, int(size))
    in_train = ~np.repeat(done.validation, done.lengths)
    histogram += np.bincount(done.tokens[in_train], minlength=len(histogram))
    progress.position = chunk.end
    progress.records += done.records
    progress.malformed += done.malformed
    progress.empty += done.empty
    for example in done.examples[: KEPT_EXAMPLES - len(progress.examples)]:
        entry = {"file": chunk.source.name, "line": example.line, "reason": example.reason}
        progress.examples.append(entry)
    by_source = progress.documents_by_source
    by_source += [0] * (chunk.start.source + 1 - len(by_source))
    by_source[chunk.start.source] += len(documents)


def _check_result(
    config: PrepareConfig, sources: Sequence[Source], writers: dict[str, SplitWriter], progress: Progress
) -> None:
    if progress.malformed > config.max_malformed * progress.records:
        raise MalformedError(_malformed_sentence(progress.malformed, progress.records, progress.examples))
    documents = sum(w.documents for w in writers.values())
    if not documents:
        raise ValueError(_empty_sentence(sources))
    for name, writer in writers.items():
        if not writer.documents:
            raise ValueError(
                f"the {name} split got none of the {documents:,} documents at a validation fraction of "
                f"{config.validation_fraction}; change the fraction, or cut documents with "
                "--max-document-chars"
            )


def _empty_sentence(sources: Sequence[Source]) -> str:
    where = sources[0].name if len(sources) == 1 else f"{len(sources)} files"
    return f"the corpus is empty: there is no text in {where}"


def _malformed_sentence(malformed: int, records: int, examples: list[dict[str, Any]]) -> str:
    shown = "; ".join(f"{e['file']}, line {e['line']}: {e['reason']}" for e in examples[:3])
    return (
        f"{malformed:,} of {records:,} lines are malformed ({shown}); mend them, or allow a larger share "
        f"with --max-malformed"
    )
