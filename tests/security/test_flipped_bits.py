"""Every bit of a checkpoint is covered: whichever one flips, the checkpoint is no longer taken for whole."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import small_checkpoints

from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manifest import MANIFEST, list_files, read_manifest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return small_checkpoints.save(tmp_path_factory.mktemp("saved"))


def unnoticed(path: Path, bits: Iterable[int], notices) -> list[int]:
    """The bits of a file that may flip without `notices` noticing; the file is as before afterwards."""
    whole = path.read_bytes()
    content, found = bytearray(whole), []
    with path.open("r+b", buffering=0) as file:
        for bit in bits:
            content[bit // 8] ^= 1 << bit % 8
            file.seek(bit // 8)
            file.write(content[bit // 8 : bit // 8 + 1])
            if not notices():
                found.append(bit)
            content[bit // 8] ^= 1 << bit % 8
            file.seek(bit // 8)
            file.write(content[bit // 8 : bit // 8 + 1])
    assert path.read_bytes() == whole
    return found


def raises(read, checkpoint: Path) -> bool:
    try:
        read(checkpoint)
    except ValueError as error:
        return "\n" not in str(error)
    return False


def test_every_bit_of_the_manifest(checkpoint) -> None:
    """Step, config, position in the data, layout, and what it says of the other files."""
    path = checkpoint / MANIFEST
    bits = range(8 * path.stat().st_size)
    assert unnoticed(path, bits, lambda: raises(read_manifest, checkpoint)) == []
    assert find_problem(checkpoint) is None


def test_bits_of_every_file(checkpoint, request) -> None:
    draw = random.Random(request.config.getoption("--seed"))
    for name in list_files(checkpoint):
        path = checkpoint / name
        bits = draw.sample(range(8 * path.stat().st_size), 200)
        assert unnoticed(path, bits, lambda: find_problem(checkpoint) is not None) == [], name
    assert find_problem(checkpoint) is None


@pytest.mark.slow
def test_every_bit_of_every_file(checkpoint) -> None:
    for name in list_files(checkpoint):
        path = checkpoint / name
        bits = range(8 * path.stat().st_size)
        assert unnoticed(path, bits, lambda: find_problem(checkpoint) is not None) == [], name
    assert find_problem(checkpoint) is None
