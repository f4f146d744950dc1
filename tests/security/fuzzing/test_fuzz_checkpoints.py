"""Any file of a checkpoint may be anything, with hashes that fit: it is read, or refused in one line."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import small_checkpoints
from hypothesis import given
from hypothesis import strategies as st
from mutations import fuzz, mutated, mutated_json, works_or_is_one_line
from saved_weights import read_weights

from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import MANIFEST, list_files, write_manifest
from matmix.use.exporting import convert_checkpoint


@functools.cache
def originals() -> dict[str, dict[str, bytes]]:
    """Kind -> file -> content of small checkpoints: as torch shards it, and portable."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        sharded = small_checkpoints.save(Path(folder) / "sharded")
        portable = Path(folder) / "portable" / sharded.name
        convert_checkpoint(sharded, portable)
        for kind, path in {"sharded": sharded, "portable": portable}.items():
            found[kind] = {name: (path / name).read_bytes() for name in list_files(path)}
    return found


@contextmanager
def unpacked(kind: str) -> Iterator[Path]:
    """A copy of the checkpoint, in a folder where nothing else may appear."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoints" / "step-00000002"
        for name, content in originals()[kind].items():
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoint / name).write_bytes(content)
        yield checkpoint
        assert sorted(path.name for path in Path(folder).iterdir()) == ["checkpoints"]


def look_at(checkpoint: Path) -> None:
    manager = CheckpointManager(checkpoint.parent)
    works_or_is_one_line(lambda: find_problem(checkpoint))
    works_or_is_one_line(lambda: manager.load(checkpoint, small_checkpoints.make_engine()))
    works_or_is_one_line(lambda: list(read_weights(checkpoint)))


@pytest.mark.parametrize("kind", ["sharded", "portable"])
def test_changed_files(kind) -> None:
    @fuzz(60)
    @given(data=st.data(), name=st.sampled_from(sorted(originals()[kind])))
    def check(data, name) -> None:
        with unpacked(kind) as checkpoint:
            (checkpoint / name).write_bytes(data.draw(mutated(originals()[kind][name])))
            if name != MANIFEST:
                small_checkpoints.rehash(checkpoint)
            look_at(checkpoint)

    check()


@pytest.mark.parametrize("name", [MANIFEST, "sharded/index.json", "generators/rank-00000.json"])
def test_values_of_other_types(name) -> None:
    whole = json.loads(originals()["sharded"][name])

    @fuzz(80)
    @given(value=mutated_json(whole))
    def check(value) -> None:
        with unpacked("sharded") as checkpoint:
            if name == MANIFEST and isinstance(value, dict):
                write_manifest(checkpoint, value)  # with a root hash that fits
            else:
                (checkpoint / name).write_text(json.dumps(value))
            if name != MANIFEST:
                small_checkpoints.rehash(checkpoint)
            look_at(checkpoint)

    check()
