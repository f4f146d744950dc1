"""`matmix checkpoints convert RUN --out OTHER_RUN`: a run that any engine goes on with, at any number of ranks."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from matmix.data.artifacts import shell_line
from matmix.data.storage.files import sync_directory
from matmix.data.storage.remote import is_url
from matmix.train.checkpoint.files import GENERATORS, describe_files, list_files, read_manifest, write_manifest
from matmix.train.engine.full_state import layout_of_moments
from matmix.train.engine.full_tensors import KIND, SUBDIRECTORY, write_full
from matmix.train.engine.kinds import open_full
from matmix.train.recipe import write_config
from matmix.train.run.directory import RunDirectory
from matmix.train.run.trained import open_trained

MAX_FILE_BYTES = 5 * 10**9


def convert_run(
    run_dir: str | Path,
    out_dir: str | Path,
    *,
    step: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write a new run with one checkpoint of another: weights, moments, step counts, random generators, position in
    the data, whichever engine wrote them.

    Needs no ranks and holds one tensor in memory.

    Args:
        run_dir: the run, a folder or a URL; its newest valid checkpoint is taken, or that of `step`.
        out_dir: must not exist, or be empty; appears whole or not at all.
        max_file_bytes: size at which another file is begun; a larger tensor has a file of its own.
    Returns: the new checkpoint. Raises FileNotFoundError or ValueError (one line).
    """
    if is_url(str(out_dir)):
        raise ValueError(f"converted runs are made in a folder, not at a URL such as {out_dir}")
    out = Path(out_dir)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; choose another one, or remove it")
    trained = open_trained(run_dir, step, weights_only=False)
    run, config, source = trained.run, trained.config, trained.checkpoint
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".tmp-{out.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    target = RunDirectory(temporary).checkpoints / source.name
    try:
        convert_checkpoint(source, target, max_file_bytes=max_file_bytes)
        write_config(dataclasses.replace(config, run_dir=str(out)), RunDirectory(temporary).config_path)
        if (run.path / "tokenizer").is_dir():
            shutil.copytree(run.path / "tokenizer", temporary / "tokenizer")
        if (run.path / "metrics.jsonl").is_file():
            shutil.copy(run.path / "metrics.jsonl", temporary)
        # Onto an empty directory, or into nothing: what came there in the meantime stays, and this fails.
        temporary.rename(out)
        sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    print(f"Converted {source.name} of {run_dir} to {out}; `{shell_line('matmix', 'train', out)}` goes on from there.")
    return RunDirectory(out).checkpoints / source.name


def convert_checkpoint(source: Path, target: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write one checkpoint, known to be whole, into the new directory `target` in the form that every engine reads."""
    manifest = read_manifest(source)
    layout = manifest["layout"]
    state = open_full(source, layout)
    write_full(state, target / SUBDIRECTORY, max_file_bytes=max_file_bytes)
    shutil.copytree(source / GENERATORS, target / GENERATORS)
    kept = {name: layout[name] for name in ("world_size", "shapes")}  # ranks: those that the generators are of
    changed = {
        "layout": {"engine": KIND, **kept, **layout_of_moments(state.moments(), layout["shapes"])},
        "files": describe_files(target, list_files(target)),
    }
    write_manifest(target, {**manifest, **changed})
