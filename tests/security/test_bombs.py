"""Small files that would become huge ones in memory or on the disk end in one line, and leave nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from folders import contents
from hostile_data import edit_manifest, prepared
from nightly import nightly

from matmix.data.formats.base import DamagedShard
from matmix.data.formats.webdataset import _MAGIC, _members
from matmix.data.splits.reader import open_dataset

MEBIBYTE = 1 << 20


def bomb_in_shard(path, size):
    """The first shard of the training split becomes `size` zeros, with a manifest that fits."""
    shard = sorted(path.glob("train/*.zst*"))[0]
    raw = zstandard.ZstdCompressor().compress(b"\0" * size)
    shard.write_bytes(raw)

    def change(manifest):
        entry = manifest["splits"]["train"]["shards"][0]
        entry["bytes"], entry["sha256"] = len(raw), hashlib.sha256(raw).hexdigest()

    return change


@pytest.mark.parametrize("format", ["mds", "webdataset"])
@pytest.mark.parametrize("kind", ["as written", "with the size that fits"])
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_shard_cannot_fill_the_cache(tmp_path, format, kind, remote):
    path, cache = prepared(tmp_path / "home", format=format), tmp_path / "cache"
    edit_manifest(path, bomb_in_shard(path, 64 * MEBIBYTE))
    if kind == "with the size that fits":
        edit_manifest(path, lambda m: m["splits"]["train"]["shards"][0].update(raw_bytes=64 * MEBIBYTE))
    shards = open_dataset(path.as_uri() if remote else str(path), cache_dir=str(cache))
    with pytest.raises(DamagedShard, match=r"shard train/\S+ decompresses to more than [\d,]+ bytes") as raised:
        shards.read(0, 0)
    assert "\n" not in str(raised.value)
    assert sum(map(len, contents(cache).values())) < MEBIBYTE
    assert not list(cache.rglob("*.part-*"))


def test_a_tar_member_of_negative_size_does_not_hold_the_reader():
    header = bytearray(512)
    header[:5], header[124:136] = b"a.npy", b"-0000001000\0"
    with pytest.raises(DamagedShard, match="no tar header at byte 0"):
        _members(memoryview(bytes(header) * 4), "here", _MAGIC)


def test_a_remote_file_larger_than_it_may_be_is_not_fetched(tmp_path):
    path, cache = prepared(tmp_path / "home"), tmp_path / "cache"
    shard = sorted(path.glob("train/*.zstd"))[0]
    shard.write_bytes(shard.read_bytes() + b"\0" * (16 * MEBIBYTE))
    shards = open_dataset(path.as_uri(), cache_dir=str(cache))
    with pytest.raises(DamagedShard, match=r"bytes, it may have"):
        shards.read(0, 0)
    (path / "token_histogram.npy").write_bytes(b"\0" * (16 * MEBIBYTE))
    with pytest.raises(ValueError, match=r"bytes, it may have"):
        shards.storage.file("token_histogram.npy")
    assert sum(map(len, contents(cache).values())) < MEBIBYTE


def bombs(folder):
    """Files of at most some hundred kB that hold one value of 512 MiB, or many such in all."""
    size, line = 512 * MEBIBYTE, b'{"text": "'
    (folder / "gz").mkdir()
    with gzip.open(folder / "gz" / "a.jsonl.gz", "wb") as file:
        file.write(line)
        for _ in range(size // MEBIBYTE):
            file.write(b"a" * MEBIBYTE)
    (folder / "xz").mkdir()
    with lzma.open(folder / "xz" / "a.txt.xz", "wb", preset=0) as file:
        for _ in range(size // MEBIBYTE):
            file.write(b"a" * MEBIBYTE)
    (folder / "zst").mkdir()
    with zstandard.open(folder / "zst" / "a.jsonl.zst", "wb") as file:
        for _ in range(size // MEBIBYTE):
            file.write(b"a" * MEBIBYTE)
    (folder / "parquet").mkdir()
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array(["a" * (2 * MEBIBYTE)]))
    pq.write_table(pa.table({"text": values}), folder / "parquet" / "a.parquet", store_schema=False)


PREPARE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]), int(sys.argv[2])))
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig
import pyarrow.parquet
try:
    prepare(PrepareConfig(inputs=(sys.argv[1],), out=sys.argv[1] + "-out", processes=1, max_line_megabytes=1,
                          text_documents=sys.argv[3]))
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def bomb_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombs")
    bombs(folder)
    return folder


@pytest.mark.parametrize("kind", [nightly("gz"), "xz", "zst", "parquet"])
def test_a_file_cannot_fill_the_memory(bomb_folder, kind):
    """With 700 MB for data in all, of which the imports take half."""
    command = [
        sys.executable,
        "-P",
        "-c",
        PREPARE,
        str(bomb_folder / kind),
        str(700 * MEBIBYTE),
        "line" if kind == "xz" else "file",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    where = "row 1" if kind == "parquet" else "line 1"
    assert f"{where}, is longer than 1 MiB" in done.stdout, done.stderr[-2000:]
    assert "--max-line-megabytes" in done.stdout
    assert done.stdout.count("\n") == 1
    assert not (bomb_folder / f"{kind}-out").exists()
