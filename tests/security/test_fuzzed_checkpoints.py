"""Any file of a checkpoint may be anything, with hashes that fit: it is read, or refused in one line."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import small_checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st

from matmix.train.checkpoint import CheckpointManager, read_portable
from matmix.train.checkpoint_files import MANIFEST, find_problem, list_files
from matmix.train.convert import convert_checkpoint


@functools.cache
def originals() -> dict[str, dict[str, bytes]]:
    """Kind -> file -> content of small checkpoints: as torch shards it, of the first version, and portable."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        sharded = small_checkpoints.save(Path(folder) / "sharded")
        portable = Path(folder) / "portable" / sharded.name
        convert_checkpoint(sharded, portable)
        first = shutil.copytree(sharded, Path(folder) / "first" / sharded.name)
        (first / "sharded" / "index.json").unlink()
        small_checkpoints.rehash(first)
        small_checkpoints.age(first)
        for kind, path in {"sharded": sharded, "portable": portable, "first": first}.items():
            found[kind] = {name: (path / name).read_bytes() for name in list_files(path)}
    return found


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "replace", "repeat"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


def edited(content: bytes, edits) -> bytes:
    """What a few small changes make of a file."""
    for kind, where, new in edits:
        place = int(where * len(content))
        if kind == "flip" and content:
            content = content[:place] + bytes([content[place] ^ (new[0] or 1)]) + content[place + 1 :]
        elif kind == "insert":
            content = content[:place] + new + content[place:]
        elif kind == "delete":
            content = content[:place] + content[place + len(new) :]
        elif kind == "replace":
            content = content[:place] + new + content[place + len(new) :]
        else:
            content = content[:place] + content[place : place + 16] * new[0] + content[place:]
    return content


def reads_or_refuses(read) -> None:
    try:
        read()
    except (ValueError, FileNotFoundError) as error:
        assert "\n" not in str(error), error  # noqa: PT017


@pytest.mark.parametrize("kind", ["sharded", "first", "portable"])
def test_edited_files(kind, request) -> None:
    names = sorted(originals()[kind])

    @settings(max_examples=1000 if request.config.getoption("--seed") else 60)
    @given(name=st.sampled_from(names), edits=EDITS)
    def check(name, edits) -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoints" / "step-00000002"
            for other, content in originals()[kind].items():
                path = checkpoint / other
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(edited(content, edits) if other == name else content)
            if name != MANIFEST:
                small_checkpoints.rehash(checkpoint)
            manager = CheckpointManager(checkpoint.parent)
            reads_or_refuses(lambda: find_problem(checkpoint))
            reads_or_refuses(lambda: manager.load(checkpoint, small_checkpoints.make_engine()))
            reads_or_refuses(lambda: list(read_portable(checkpoint)))
            assert sorted(path.name for path in Path(folder).iterdir()) == ["checkpoints"]

    check()
