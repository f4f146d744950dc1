"""Shards that the libraries read (`data.reader`): whatever is in them, nothing runs, and one line says so."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
import tarfile

import numpy as np
import pytest
import zstandard
from hostile_data import edit_manifest, prepared

from matmix.data.formats.base import DamagedShard
from matmix.data.splits.reader import open_dataset

READERS = {"streaming": "mds", "webdataset": "webdataset"}


class Payload:
    def __reduce__(self):
        return pytest.fail, ("what a file holds was run",)


def forged(path, raw):
    """The first shard becomes zstd of these bytes, with a manifest that fits."""
    shard = min(path.glob("train/*.zst*"))
    packed = zstandard.ZstdCompressor().compress(raw)
    shard.write_bytes(packed)
    digests = {"sha256": hashlib.sha256(packed).hexdigest(), "raw_sha256": hashlib.sha256(raw).hexdigest()}
    entry = {"bytes": len(packed), "raw_bytes": len(raw), **digests}
    edit_manifest(path, lambda manifest: manifest["splits"]["train"]["shards"][0].update(entry))


def refused(path, reader, cache):
    (part,) = open_dataset(str(path), cache_dir=str(cache)).streams(1, reader)
    with pytest.raises(DamagedShard) as raised:
        [part.read(0, index) for index in range(len(part.lengths(0)))]
    assert "\n" not in str(raised.value)
    return str(raised.value)


def tar_of(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_members_of_tar_files_are_not_unpickled(tmp_path):
    objects = io.BytesIO()
    np.save(objects, np.array([Payload()], dtype=object), allow_pickle=True)
    for number, name in enumerate(["0.npy", "0.pyd", "0.pkl", "0.pth"]):
        path = prepared(tmp_path / str(number), format="webdataset")
        content = objects.getvalue() if name == "0.npy" else pickle.dumps(Payload())
        forged(path, tar_of((name, content)))
        assert "webdataset cannot read it" in refused(path, "webdataset", tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_changed_bytes(tmp_path, reader):
    path = prepared(tmp_path, format=READERS[reader])
    raw = zstandard.ZstdDecompressor().decompress(min(path.glob("train/*.zst*")).read_bytes())
    draw = random.Random(0)
    kinds = [b"", draw.randbytes(3000), raw[:600], raw[:100] + draw.randbytes(len(raw) - 100)]
    for content in kinds:
        forged(path, content)
        refused(path, reader, tmp_path / "cache")


@pytest.mark.parametrize("reader", READERS)
def test_a_shard_cannot_fill_the_memory(tmp_path, reader):
    path = prepared(tmp_path, format=READERS[reader])
    forged(path, b"\0" * (64 << 20))
    for raw_bytes in (64 << 20, 5000):
        edit_manifest(path, lambda m: m["splits"]["train"]["shards"][0].update(raw_bytes=raw_bytes))  # noqa: B023
        assert "decompress" in refused(path, reader, tmp_path / "cache")
