"""A preparation whose result lies at a URL: made in a folder of this machine, then uploaded, the manifest last."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from matmix.data.manifest import MANIFEST_NAME, Manifest
from matmix.data.prepare.command import prepare, read_input
from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.report import print_summary
from matmix.data.prepare.workspace import compare_preparations, parse_object
from matmix.data.storage.remote import RemoteError, RemoteFolder, scratch_folder

logger = logging.getLogger(__name__)

# At the URL while an upload is not finished: whose it is.
_UNFINISHED = ".prepare.json"


def prepare_to_url(config: PrepareConfig) -> Manifest:
    """`prepare` for a `config.out` that is a URL; the same call continues what was stopped, also within the upload.

    A complete dataset of the same options at the URL is left as it is. Raises as `prepare`, ValueError if the URL
    holds anything else, and RemoteError (one line) if the store fails: what was prepared and uploaded is kept.
    """
    _, _, wanted = read_input(config)
    return make_at_url(
        config.out, wanted, lambda folder: prepare(replace(config, out=folder), summary=False), print_summary
    )


def make_at_url(
    url: str,
    wanted: dict[str, Any],
    make: Callable[[str], Manifest],
    say: Callable[[Manifest, str, str], None],
) -> Manifest:
    """As `prepare_to_url`, for a preparation of any kind.

    wanted: its fingerprint. make: prepares in the folder of that path. say: prints a summary of a manifest, the place
    where it lies, and when it was made.
    """
    remote = RemoteFolder(url)
    if (manifest := _finished(remote, wanted)) is not None:
        say(manifest, remote.url, "earlier, with the same input and options: nothing to do")
        return manifest
    folder = scratch_folder("prepare", remote.url)
    logger.info(f"preparing in {folder}, to be uploaded to {remote.url}")
    started = time.monotonic()
    manifest = make(str(folder))
    try:
        _upload(folder, remote, wanted)
    except RemoteError:
        logger.info(f"the prepared dataset is kept in {folder}: the same command goes on with the upload")
        raise
    shutil.rmtree(folder, ignore_errors=True)
    say(manifest, remote.url, f"in {time.monotonic() - started:.0f} s, with its upload")
    return manifest


def _finished(remote: RemoteFolder, wanted: dict[str, Any]) -> Manifest | None:
    """The manifest of this preparation if it is complete at the URL. Raises ValueError if something else is there."""
    if (raw := remote.read(MANIFEST_NAME)) is not None:
        manifest = Manifest.parse(raw, remote.url)
        compare_preparations(remote.url, manifest.options, wanted)
        return manifest
    if (raw := remote.read(_UNFINISHED)) is not None:
        compare_preparations(remote.url, parse_object(raw, f"{remote.url}/{_UNFINISHED}"), wanted)
    elif remote.sizes():
        raise ValueError(f"{remote.url} is not empty and holds no preparation of matmix; choose another output URL")
    return None


def _upload(folder: Path, remote: RemoteFolder, wanted: dict[str, Any]) -> None:
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    del files[MANIFEST_NAME]
    remote.write(_UNFINISHED, json.dumps(wanted).encode())
    # The same text and options give the same bytes, so that a file of the same name and size is the same file.
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
