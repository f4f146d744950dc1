"""What lies in the cache is compared with what was prepared whenever a process first opens it."""

from __future__ import annotations

import os

import pytest
from hostile_data import prepared

from matmix.data.splits.reader import open_dataset


@pytest.fixture(params=[("mds", "zstd"), ("webdataset", "none")], ids="-".join)
def dataset(request, tmp_path):
    format, compression = request.param
    return prepared(tmp_path, format=format, compression=compression)


def everything(where, cache, **options):
    shards = open_dataset(where, cache_dir=str(cache), **options)
    assert shards.n_shards > 2
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


def cached(cache):
    return sorted([*cache.rglob("train/*.mds"), *cache.rglob("train/*.tar")])


def flip(path, position=-20):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_damaged_copy_is_made_again(dataset, tmp_path, remote, told):
    where, cache = dataset.as_uri() if remote else str(dataset), tmp_path / "cache"
    expected = everything(where, cache)
    copies = cached(cache)
    if not copies:
        return  # used where they lie
    good = [copy.read_bytes() for copy in copies]
    for harm in (flip, lambda path: path.write_bytes(path.read_bytes()[:-7]), lambda path: path.write_bytes(b"")):
        harm(copies[1])
        told.clear()
        assert everything(where, cache) == expected
        (said,) = told
        assert said.startswith(f"warning: {copies[1]} was damaged in the data cache")
        assert [copy.read_bytes() for copy in copies] == good
    told.clear()
    assert everything(where, cache) == expected
    assert not told
    assert not list(cache.rglob("*.part-*"))


def test_unverified_reading_does_not_look(tmp_path, capfd):
    path, cache = prepared(tmp_path), tmp_path / "cache"
    everything(str(path), cache)
    os.utime(cached(cache)[0], (1, 1))
    flip(cached(cache)[0])
    everything(str(path), cache, verify=False)
    assert "damaged" not in capfd.readouterr().err


def test_a_copy_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, events = prepared(tmp_path), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"-> {b}"), replace(a, b)))
    everything(str(path), tmp_path / "cache")
    for copy in cached(tmp_path / "cache"):
        renamed = events.index(f"-> {copy}")
        assert events[renamed - 1].startswith(f"{copy}.part-")
        assert events[renamed + 1] == str(copy.parent)
