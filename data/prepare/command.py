"""Prepares a dataset: the command flow that all kinds of data share.

    matmix prepare bundled:shakespeare --out datasets/shakespeare --vocab-size 4096 --max-document-chars 2000

One process reads the input in order and writes the shards, others turn it into documents. What comes out depends on the
input and the options, not on the number of processes nor on stops.
"""

import itertools
import json
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from matmix.data.arrays import write_vector
from matmix.data.formats import make_format
from matmix.data.manifest import MANIFEST_NAME, Manifest
from matmix.data.prepare.base import Position, Preparation, PrepareOptions
from matmix.data.prepare.parts import Parts, Share
from matmix.data.prepare.pool import work_in_order
from matmix.data.prepare.report import Prepared, Report, check_broken, print_summary
from matmix.data.prepare.workspace import PART_NAME, SUMS_NAME, Workspace, compare_preparations, parse_object
from matmix.data.processes import cores
from matmix.data.splits.writer import SplitWriter
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import RemoteError, RemoteFolder, is_url, scratch_folder

logger = logging.getLogger(__name__)

# Seconds between two saved states; what was done since is done again after a stop. A state holds up to a shard of each
# split, so it is saved more rarely where saving would take more than the given share of the time.
STATE_SECONDS = 5.0
STATE_SHARE = 0.05
# After so many records without a single good one, something else is wrong with them than a few bad lines.
HOPELESS_RECORDS = 1000
# The file at a URL that says whose unfinished upload lies there.
_UNFINISHED = ".prepare.json"
_NOTHING_TO_DO = "earlier, with the same input and options: nothing to do"


def prepare(config: PrepareOptions, *, summary: bool = True) -> Manifest:
    """Writes the dataset of `config` (or its part `config.part`), or continues it; `config.out` may be a URL.

    Progress goes to stderr, the summary to stdout. A complete dataset of the same options is left as it is. Raises
    FileNotFoundError and ValueError (one line) for mistakes of the user, and touches nothing then; RuntimeError if a
    working process was killed, RemoteError (one line) if the store of a URL fails: what was done is kept.
    """
    if config.part:
        _refuse_url(config.out)
    preparation = config.kind()(config)
    make = _make_at_url if is_url(config.out) else _make
    manifest, out, when = make(preparation, config.out)
    if summary:
        print_summary(type(preparation), manifest, out, when)
    return manifest


def prepare_shared(config: PrepareOptions) -> Path:
    """Makes only the files that all parts of `config.out` share; returns their folder. Raises as `prepare`."""
    _refuse_url(config.out)
    preparation = config.kind()(config)
    workspace, parts = Workspace(config.out, preparation.wanted), Parts(config.out, type(preparation))
    if (workspace.out / MANIFEST_NAME).exists() and workspace.check() == "finished":
        return workspace.out
    parts.begin(preparation)
    return parts.folder


def _refuse_url(out: str) -> None:
    if is_url(out):
        raise ValueError(f"parts are made in a folder that all machines share, not at a URL such as {out}")


def _make(preparation: Preparation, out: str) -> tuple[Manifest, Path, str]:
    """Returns the manifest of the dataset in the folder `out`, the folder, and when it was made."""
    workspace, when = Workspace(out, preparation.wanted), _NOTHING_TO_DO
    share, shared = Share(0, 1, Position(), Position(source=len(preparation.sources))), workspace.out
    if preparation.config.share is not None and not (workspace.out / MANIFEST_NAME).exists():
        parts = Parts(out, type(preparation))
        parts.begin(preparation, *preparation.config.share)
        share = parts.share(preparation, *preparation.config.share)
        wanted = {**preparation.wanted, "part": preparation.config.part}
        workspace, shared = Workspace(parts.part(share), wanted), parts.folder
    status = workspace.check()
    if status != "finished":
        started = time.monotonic()
        # Before the folder is made, so that an error in the input leaves none behind.
        preparation.ready(shared, is_part=share.number > 0)
        with workspace.filling(is_new=status == "new", files=preparation.files) as is_wanted:
            if is_wanted:
                preparation.save_shared(workspace.out)
                _write(preparation, workspace, share)
                when = f"in {time.monotonic() - started:.0f} s"
    manifest = Manifest.load(workspace.out)
    shutil.rmtree(workspace.work, ignore_errors=True)
    return manifest, workspace.out, when


def _write(preparation: Preparation, workspace: Workspace, share: Share) -> None:
    """Writes all shards (of a share of the input) and the other files, the manifest last."""
    kind, config, out = type(preparation), preparation.config, workspace.out
    prefix = f"{share.number:05}-" if share.number else ""
    shard_format = make_format(workspace.wanted, preparation.dtype, prefix=prefix)
    writers = {name: SplitWriter(shard_format, out / name, workspace.work / name) for name in preparation.splits}
    sums = preparation.new_sums()
    progress = workspace.restore(writers, sums, share.start)
    if progress.records:
        logger.info(f"continuing after {sum(w.documents for w in writers.values()):,} {kind.unit}")
    before = list(itertools.accumulate((source.bytes for source in preparation.sources), initial=0))
    size = before[-1] // share.of  # about: parts hold whole records
    begin = size * max(0, share.number - 1)
    processes = config.processes or min(cores(), 1 + size // kind.bytes_a_process)
    chunks = preparation.chunks(progress.position, share.stop, share.start)
    saved, pause, hopeless = time.monotonic(), STATE_SECONDS, False

    def count() -> int:
        return sum(getattr(writer, kind.counted) for writer in writers.values())

    with (
        Report(kind.doing, size, unit=kind.counted, made=count()) as report,
        closing(work_in_order(chunks, processes, preparation.worker(), doing=kind.doing)) as results,
    ):
        for chunk, made in results:
            for document, size, validation in zip(made.split(), made.sizes, made.validation, strict=True):
                writers["validation" if validation else "train"].write(document, int(size))
            kind.add(sums, made.sums)
            progress.add(chunk, made)
            report.update(before[chunk.start.source] + chunk.disk_bytes - begin, count())
            if hopeless := progress.malformed == progress.records >= HOPELESS_RECORDS:
                break
            if (now := time.monotonic()) - saved >= pause:
                workspace.save(progress, writers, sums)
                saved = time.monotonic()
                pause = max(STATE_SECONDS, (saved - now) / STATE_SHARE)
    workspace.save(progress, writers, sums)
    if hopeless and share.number:
        check_broken(kind, progress, 0)
    splits = {name: writer.finish() for name, writer in writers.items()}
    prepared = Prepared(kind, out, workspace.wanted, preparation.names, shard_format, splits, progress, sums)
    if share.number:  # the merge checks parts
        write_atomic(out / PART_NAME, json.dumps({"spans": progress.spans}).encode())
        write_vector(out / SUMS_NAME, "int64", len(sums), [sums.tobytes()])
        prepared.write_manifest([SUMS_NAME])
    else:
        prepared.check(getattr(config, kind.most_broken))
        prepared.write_manifest()


def _make_at_url(preparation: Preparation, url: str) -> tuple[Manifest, str, str]:
    """Does what `_make` does in a folder of this machine, and uploads the dataset, its manifest last."""
    remote, wanted = RemoteFolder(url), preparation.wanted
    if (manifest := _finished(remote, wanted)) is not None:
        return manifest, remote.url, _NOTHING_TO_DO
    folder = scratch_folder("prepare", remote.url)
    logger.info(f"preparing in {folder}, to be uploaded to {remote.url}")
    started = time.monotonic()
    manifest, _, _ = _make(preparation, str(folder))
    try:
        _upload(folder, remote, wanted)
    except RemoteError:
        logger.info(f"the prepared dataset is kept in {folder}: the same command goes on with the upload")
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return manifest, remote.url, f"in {time.monotonic() - started:.0f} s, with its upload"


def _finished(remote: RemoteFolder, wanted: Mapping[str, Any]) -> Manifest | None:
    """Returns the manifest of this preparation if it is complete at the URL. Raises ValueError for anything else."""
    if (raw := remote.read(MANIFEST_NAME)) is not None:
        manifest = Manifest.parse(raw, remote.url)
        compare_preparations(remote.url, manifest.options, wanted)
        return manifest
    if (raw := remote.read(_UNFINISHED)) is not None:
        compare_preparations(remote.url, parse_object(raw, f"{remote.url}/{_UNFINISHED}"), wanted)
    elif remote.sizes():
        raise ValueError(f"{remote.url} is not empty and holds no preparation of matmix; choose another output URL")
    return None


def _upload(folder: Path, remote: RemoteFolder, wanted: Mapping[str, Any]) -> None:
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    del files[MANIFEST_NAME]
    remote.write(_UNFINISHED, json.dumps(wanted).encode())
    # The same input and options give the same bytes, so that a file of the same name and size is the same file.
    there = remote.sizes()
    missing = [name for name, size in files.items() if there.get(name) != size]
    megabytes = sum(files[name] for name in missing) / 1e6
    logger.info(f"uploading {len(missing)} of {len(files)} files ({megabytes:,.1f} MB) to {remote.url}")
    remote.upload_all(folder, missing)
    there = remote.sizes()
    for name, size in files.items():
        if there.get(name) != size:
            raise RemoteError(f"{remote.url}/{name} has {there.get(name, 0)} bytes after its upload instead of {size}")
    remote.upload(folder / MANIFEST_NAME, MANIFEST_NAME)
    remote.remove([_UNFINISHED])
