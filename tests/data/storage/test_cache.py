"""The folder of downloaded and decompressed shards keeps to its size, and never takes a shard from a reader."""

import gc
import itertools
import multiprocessing
import os
import time

import numpy as np
import pytest

from matmix.data.config import DataConfig
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import open_dataset
from matmix.data.storage import cache as module
from matmix.data.storage import storage
from matmix.data.storage.cache import hold_shard, make_room


@pytest.fixture
def path(data, tmp_path):
    """Sixteen shards of some 4 kB each."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(data.first_word, data.vocab_size, 500) for _ in range(64)]
    return data.write(tmp_path / "data", documents, compression="zstd", shard_documents=4)


def shards_in(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in (".mds", ".tar"))


def size_of(folder):
    return sum(p.stat().st_size for p in shards_in(folder))


def everything(shards):
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


def test_the_least_recently_used_shards_go(path, tmp_path):
    cache = tmp_path / "cache"
    expected = everything(open_dataset(str(path), cache_dir=str(tmp_path / "unlimited")))
    one = shards_in(tmp_path / "unlimited")[0].stat().st_size
    limit = 5 * one + one // 2
    shards = open_dataset(str(path), cache_dir=str(cache), keep_open=1, cache_bytes=limit)
    assert everything(shards) == expected
    assert [p.name for p in shards_in(cache)] == [f"shard.{i:05}.mds" for i in range(11, 16)]
    shards.read(11, 0)  # used again: the next to go is 12
    for number in (0, 1):
        shards.read(number, 0)
    assert [p.name for p in shards_in(cache)] == [f"shard.{i:05}.mds" for i in (0, 1, 11, 14, 15)]
    assert everything(open_dataset(str(path), cache_dir=str(cache), cache_bytes=limit)) == expected


def test_what_is_open_stays(path, tmp_path):
    cache = tmp_path / "cache"
    shards = open_dataset(str(path), cache_dir=str(cache), keep_open=4, cache_bytes=1)
    tokens = shards.read(0, 0)
    for number in range(1, 8):
        shards.read(number, 0)
    held = {p.name for p in shards_in(cache)}
    assert held == {f"shard.{i:05}.mds" for i in range(4, 8)}
    assert tokens.tolist() == open_dataset(str(path), cache_dir=str(tmp_path / "other")).read(0, 0).tolist()
    del shards
    gc.collect()
    make_room(cache, 1, [".mds"])
    assert shards_in(cache) == []


def test_several_datasets_share_the_limit_and_other_files_are_left_alone(path, data, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "mine.tar").write_bytes(b"x" * 10_000)
    (cache / "mine").mkdir()
    (cache / "mine" / "a.mds").write_bytes(b"x" * 10_000)
    second = data.write(tmp_path / "second", data.documents(43), format="webdataset", compression="zstd")
    for folder in (path, second):
        everything(open_dataset(str(folder), cache_dir=str(cache), keep_open=1, cache_bytes=20_000))
    assert (cache / "mine.tar").exists()
    assert (cache / "mine" / "a.mds").exists()
    assert size_of(cache) - 20_000 <= 20_000
    assert everything(open_dataset(str(path))) == everything(open_dataset(str(path), cache_dir=str(cache)))


def test_local_uncompressed_shards_are_never_removed(data, tmp_path):
    path = data.write(tmp_path / "data", data.documents(43))
    everything(open_dataset(str(path), keep_open=1, cache_bytes=1))
    assert len(shards_in(path / "train")) == 6


def test_what_killed_downloads_left_goes_when_it_is_old(path, tmp_path):
    cache = tmp_path / "cache"
    shards = open_dataset(str(path), cache_dir=str(cache), cache_bytes=10**9)
    shards.read(0, 0)
    folder = shards_in(cache)[0].parent
    old, new = folder / "shard.00003.mds.part-123", folder / "shard.00004.mds.part-124"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (time.time() - 10**6,) * 2)
    shards.read(1, 0)
    assert not old.exists()
    assert new.exists()


def test_a_shard_that_vanishes_before_it_is_held_is_fetched_again(tmp_path, monkeypatch):
    cache = tmp_path / "root" / "data-0123456789abcdef"
    path = cache / "train" / "shard.00000.mds"
    path.parent.mkdir(parents=True)
    fetched, flock = [], module.fcntl.flock

    def fetch():
        fetched.append(path)
        path.write_bytes(b"tokens")
        return path

    def removed_just_before(handle, operation):
        if len(fetched) == 1:
            path.unlink()
        flock(handle, operation)

    monkeypatch.setattr(module.fcntl, "flock", removed_just_before)
    assert hold_shard(cache, fetch)[0] == path
    assert len(fetched) == 2
    assert path.exists()


def test_a_shard_that_others_remove_while_it_is_checked_is_made_again(path, tmp_path, monkeypatch, told):
    cache, expected = tmp_path / "cache", everything(open_dataset(str(path), cache_dir=str(tmp_path / "other")))
    everything(open_dataset(str(path), cache_dir=str(cache)))
    digest, removed = storage.sha256_of, []

    def after_others_made_room(copy, *stretch):
        if copy.is_relative_to(cache) and copy.suffix == ".mds" and copy.name not in removed:
            removed.append(copy.name)
            copy.unlink()
        return digest(copy, *stretch)

    monkeypatch.setattr(storage, "sha256_of", after_others_made_room)
    assert everything(open_dataset(str(path), cache_dir=str(cache))) == expected
    assert len(removed) == 16
    assert not told  # nothing was damaged


def read_all(path, cache, seed, start, results):
    shards = open_dataset(path, cache_dir=cache, keep_open=2, cache_bytes=20_000)
    start.wait()
    order = np.random.default_rng(seed).integers(0, 16, 150)
    results.put([int(shards.read(int(s), 1).sum()) for s in order])


@pytest.mark.slow
def test_processes_with_a_small_cache(path, tmp_path):
    """Four processes read at random with room for five shards, and each gets its tokens every time."""
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    arguments = (str(path), str(tmp_path / "cache"))
    processes = [context.Process(target=read_all, args=(*arguments, s, start, results)) for s in range(4)]
    for process in processes:
        process.start()
    start.set()
    found = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    whole = open_dataset(str(path), cache_dir=str(tmp_path / "other"))
    sums = [int(whole.read(s, 1).sum()) for s in range(16)]
    orders = [np.random.default_rng(seed).integers(0, 16, 150) for seed in range(4)]
    assert found == sorted([sums[s] for s in order] for order in orders)


def test_the_option_of_the_loader(path, tmp_path):
    config = DataConfig(
        path=str(path), seqlen=64, shuffle_block=1, cache_dir=str(tmp_path / "cache"), cache_gigabytes=2e-5, workers=0
    )
    loader = build_loader(config, global_batch_size=4, micro_batch_size=4)
    list(itertools.islice(iter(loader), 120))
    assert 0 < size_of(tmp_path / "cache") <= 20_000
    with pytest.raises(ValueError, match=r"data\.cache_gigabytes must be 0 or more"):
        DataConfig(cache_gigabytes=-1)
