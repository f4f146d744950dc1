"""Text files to a dataset of token shards: `prepare`.

    matmix prepare --inputs bundled:shakespeare --out datasets/shakespeare --vocab-size 4096
    --max-document-chars 2000

One process reads the files in order and writes the shards, others tokenise. What comes out depends on the
text and on the options, not on the number of processes nor on how often the work was stopped and taken up
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from matmix.data.formats import make_format
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.cuts import find_cuts
from matmix.data.prepare.parts import Parts, Share, write_spans
from matmix.data.prepare.pool import Tokenized, tokenize_in_order
from matmix.data.prepare.readers import read_chunks
from matmix.data.prepare.report import MalformedError, check_malformed, check_splits, print_summary, write_manifest
from matmix.data.prepare.sources import Chunk, Position, Source, find_sources
from matmix.data.prepare.tokenizer import copied_tokenizer, train_tokenizer
from matmix.data.prepare.validation import usable_fraction
from matmix.data.prepare.workspace import SPLITS, Progress, Workspace, fingerprint, write_histogram
from matmix.data.processes import cores
from matmix.data.progress import ProgressReport
from matmix.data.splits.writer import SplitWriter
from matmix.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

__all__ = ["MalformedError", "PrepareConfig", "prepare"]

# How often the state is saved; what was done since is done again after a stop. A state holds up to a shard of
# each split, so it is saved more rarely where that would take more than the given share of the time.
STATE_SECONDS = 5.0
STATE_SHARE = 0.05
# So many records without a single good one: something else is wrong with them than a few bad lines.
HOPELESS_RECORDS = 1000


def prepare(config: PrepareConfig, *, summary: bool = True) -> Manifest:
    """Write the dataset that `config` describes (or its part `config.part`), or go on with it, and say what came out.

    Progress goes to stderr, the summary to stdout. A complete dataset of the same options is left as it is.

    Raises FileNotFoundError and ValueError (one line each) for what a user can mend; nothing that was there
    before is touched then. Raises RuntimeError if a tokenising process was killed.
    """
    sources, make_tokenizer, wanted = read_input(config)
    workspace, tokenizer = Workspace(config.out, wanted), None
    share = Share(number=0, start=Position(), stop=Position(source=len(sources)))
    when = "earlier, with the same input and options: nothing to do"
    if config.share is not None and not (workspace.out / MANIFEST_NAME).exists():
        parts, (number, of) = Parts(config.out), config.share
        tokenizer = parts.begin(config, wanted, sources, make_tokenizer)
        share = parts.share(number, of, lambda: find_cuts(sources, config, of))
        workspace = Workspace(str(parts.part(number, of)), {**wanted, "part": config.part})
    status = workspace.check()
    if status == "unfinished":
        tokenizer = copied_tokenizer(workspace.out) or tokenizer
    if status != "finished":
        # Parts may have one split only.
        fraction = config.validation_fraction if share.number else usable_fraction(config, sources)
        # Made before the folder is, so that an error in the input leaves none behind.
        started = time.monotonic()
        tokenizer = tokenizer or make_tokenizer()

        def write() -> None:
            if copied_tokenizer(workspace.out) is None:
                tokenizer.save(workspace.out / "tokenizer")
            _write(config, sources, workspace, share, fraction)

        if workspace.fill(write, is_new=status == "new", kept=MalformedError):
            when = f"in {time.monotonic() - started:.0f} s"
    manifest = Manifest.load(workspace.out)
    workspace.clear_work()
    if summary:
        print_summary(manifest, workspace.out, when)
    return manifest


def prepare_tokenizer(config: PrepareConfig) -> Tokenizer:
    """Make the tokenizer that all parts of `config.out` will share, unless it is there. Raises as `prepare`."""
    sources, make_tokenizer, wanted = read_input(config)
    workspace = Workspace(config.out, wanted)
    if (workspace.out / MANIFEST_NAME).exists() and workspace.check() == "finished":
        return Tokenizer.load(workspace.out)
    return Parts(config.out).begin(config, wanted, sources, make_tokenizer)


def read_input(config: PrepareConfig) -> tuple[list[Source], Callable[[], Tokenizer], dict[str, Any]]:
    """The input files, what gives or trains the tokenizer, and the fingerprint of the whole preparation."""
    sources, ignored = find_sources(config.inputs)
    if ignored:
        logger.info(f"passed over {len(ignored)} files that are no .txt, .jsonl or .parquet, such as {ignored[0]}")
    given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    wanted = fingerprint(config, sources, given.sha256 if given else "")
    return sources, lambda: given or train_tokenizer(config, sources), wanted


def _write(config: PrepareConfig, sources: list[Source], workspace: Workspace, share: Share, fraction: float) -> None:
    """All shards (of a share of the input) and everything else, the manifest last. fraction: of the documents, for
    validation."""
    tokenizer = Tokenizer.load(workspace.out)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    shard_format = make_format(workspace.wanted, dtype, prefix=f"{share.number:05}-" if share.number else "")
    splits = SPLITS if config.validation_fraction else SPLITS[:1]
    writers = {name: SplitWriter(shard_format, workspace.out / name, workspace.work / name) for name in splits}
    histogram = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    progress = workspace.restore(writers, histogram, share.start)
    if progress.records:
        logger.info(f"continuing after {sum(w.documents for w in writers.values()):,} documents")
    worker = (tokenizer.path, dtype, config, fraction)
    chunks = read_chunks(share.name(sources), config, progress.position, share.stop)
    bytes_before = np.cumsum([0, *(s.bytes for s in sources), 0])
    # Of a compressed file it is known only how much of the disk was read, not where on the disk a position lies.
    begin, end = (int(bytes_before[p.source]) + p.offset for p in (share.start, share.stop))
    processes = config.processes or min(cores(), 1 + max(0, end - begin) // (1 << 20))
    saved, pause, hopeless = time.monotonic(), STATE_SECONDS, False
    with (
        ProgressReport(end - begin, tokens=sum(w.tokens for w in writers.values())) as report,
        closing(tokenize_in_order(chunks, processes, worker)) as results,
    ):
        for chunk, done in results:
            _add(chunk, done, writers, histogram, progress)
            read = int(bytes_before[chunk.start.source]) + chunk.disk_bytes - begin
            report.update(read, sum(w.tokens for w in writers.values()))
            if hopeless := progress.malformed == progress.records >= HOPELESS_RECORDS:
                break
            if (now := time.monotonic()) - saved >= pause:
                workspace.save(progress, writers, histogram)
                saved = time.monotonic()
                pause = max(STATE_SECONDS, (saved - now) / STATE_SHARE)
    if not share.number:
        check_malformed(progress, config.max_malformed)
        check_splits(writers, sources, config.validation_fraction)
    elif hopeless:
        check_malformed(progress, 0)
    workspace.save(progress, writers, histogram)
    for writer in writers.values():
        writer.finish()
    write_histogram(workspace.out, histogram)
    if share.number:
        write_spans(workspace.out, progress.spans)
    splits = {name: SplitInfo.of(writer.shards, writer.text_bytes) for name, writer in writers.items()}
    write_manifest(workspace.out, workspace.wanted, sources, tokenizer, shard_format, splits, progress)


def _add(
    chunk: Chunk, done: Tokenized, writers: dict[str, SplitWriter], histogram: np.ndarray, progress: Progress
) -> None:
    documents = np.split(done.tokens, np.cumsum(done.lengths)[:-1]) if len(done.lengths) else []
    for tokens, size, is_validation in zip(documents, done.text_bytes, done.validation, strict=True):
        writers["validation" if is_validation else "train"].write(tokens, int(size))
    in_train = ~np.repeat(done.validation, done.lengths)
    histogram += np.bincount(done.tokens[in_train], minlength=len(histogram))
    progress.position = chunk.end
    progress.records += done.records
    progress.empty += done.empty
    progress.add_malformed(chunk.source.name, done.examples, done.malformed)
    spans, begin = progress.spans, [chunk.start.source, chunk.start.offset]
    if not spans or [spans[-1][0], spans[-1][2]] != begin:
        spans.append([*begin, chunk.start.offset, 0, 0, 0])
    span = spans[-1]
    span[2] = chunk.end.offset
    span[3] += chunk.end.line - chunk.start.line
    span[4] += done.records
    span[5] += len(documents)
