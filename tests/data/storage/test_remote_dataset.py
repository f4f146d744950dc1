"""Datasets in an object store: prepared into it, read from it by several processes, and what is said when it fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
from nightly import nightly
from object_store import running_store

from matmix.data.config import DataConfig
from matmix.data.modalities import build_loader
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig
from matmix.data.splits.reader import open_dataset
from matmix.data.storage.remote import RemoteError, scratch_folder


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with running_store(monkeypatch) as running:
        yield running


def options(tmp_path, out: str, **changes) -> PrepareConfig:
    text = tmp_path / "text.txt"
    if not text.exists():
        words = np.random.default_rng(0).choice(["king", "queen", "sword", "crown", "night"], (300, 40))
        text.write_text("\n".join(" ".join(row) for row in words))
    values = {"vocab_size": 290, "text_documents": "line", "shard_megabytes": 0.012, "validation_fraction": 0.1}
    return PrepareConfig(inputs=(str(text),), out=out, processes=1, **{**values, **changes})


def local_files(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def remote_files(store, prefix: str) -> dict[str, bytes]:
    return {key.removeprefix(f"{prefix}/"): store.get(key) for key in store.names(prefix)}


@pytest.mark.slow
def test_prepare_into_a_store_gives_what_a_folder_gets(store, tmp_path, capsys):
    prepare(options(tmp_path, str(tmp_path / "local")))
    expected = local_files(tmp_path / "local")
    assert len(expected) > 5
    capsys.readouterr()
    prepare(options(tmp_path, f"{store.url}/sets/x"))
    assert f"next: matmix train RECIPE.toml --data.path {store.url}/sets/x\n" in capsys.readouterr().out
    assert remote_files(store, "sets/x") == expected
    assert not scratch_folder("prepare", f"{store.url}/sets/x").exists()
    writes = [path for method, path in store.requests if method == "PUT"]
    assert writes[-1].endswith("/manifest.json")
    # The same again writes nothing; other options, or a place with something else in it, are refused.
    prepare(options(tmp_path, f"{store.url}/sets/x"))
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"sets/x holds another preparation \(vocab_size 290 there, 300 here\)"):
        prepare(options(tmp_path, f"{store.url}/sets/x", vocab_size=300))
    with pytest.raises(ValueError, match=r"sets is not empty and holds no preparation of matmix"):
        prepare(options(tmp_path, f"{store.url}/sets"))
    assert [path for method, path in store.requests if method == "PUT"] == writes


@pytest.mark.slow
def test_a_failed_upload_is_continued_by_the_same_command(store, tmp_path, capsys):
    url = f"{store.url}/x"
    store.fail(1000, part="shard.00003")
    with pytest.raises(RemoteError, match=rf"^cannot upload {url}/train/shard.00003\S+: .*internal error"):
        prepare(options(tmp_path, url))
    assert "x/manifest.json" not in store.names()
    with pytest.raises(FileNotFoundError, match=rf"^there is no prepared dataset at {url}"):
        open_dataset(url)
    with pytest.raises(ValueError, match="holds another preparation"):
        prepare(options(tmp_path, url, vocab_size=300))
    before = {path.rpartition("/")[2] for method, path in store.requests if method == "PUT"}
    store.fail(0)
    store.requests.clear()
    prepare(options(tmp_path, url))
    again = {path.rpartition("/")[2] for method, path in store.requests if method == "PUT"}
    assert {name for name in again if name.startswith("shard.00003")}
    assert not [name for name in again & before if name.startswith(("shard.00000", "tokenizer"))]
    prepare(options(tmp_path, str(tmp_path / "local")))
    assert remote_files(store, "x") == local_files(tmp_path / "local")


@pytest.mark.parametrize("format", ["mds", nightly("webdataset")])
def test_batches_from_a_store_equal_those_from_a_folder(store, tmp_path, format):
    prepare(options(tmp_path, str(tmp_path / "local"), format=format))
    prepare(options(tmp_path, f"{store.url}/x", format=format))

    def batches(path: str, workers: int) -> list:
        loader = build_loader(
            DataConfig(path=path, seqlen=32, workers=workers, shuffle_block=2),
            split="train",
            global_batch_size=4,
            micro_batch_size=4,
            seed=1,
        )
        found = iter(loader)
        return [next(found).input_ids.tolist() for _ in range(40)]

    expected = batches(str(tmp_path / "local"), 0)
    # Reading processes are forked from one that has used the store's client: they need clients of their own.
    assert batches(f"{store.url}/x", 2) == expected
    store.stop()  # everything is in the cache but the manifest
    with pytest.raises(RemoteError, match=rf"^cannot download {store.url}/x/manifest.json: "):
        batches(f"{store.url}/x", 0)


def test_shards_that_are_damaged_truncated_or_missing_in_the_store(store, tmp_path):
    prepare(options(tmp_path, f"{store.url}/x"))
    shards = json.loads(store.get("x/manifest.json"))["splits"]["train"]["shards"]
    key = f"x/train/{shards[1]['file']}"
    whole = store.get(key)

    def read() -> None:
        open_dataset(f"{store.url}/x").read(1, 0)

    for content in (whole[:-5], whole[:-1] + bytes([whole[-1] ^ 1])):
        store.put(key, content)
        store.requests.clear()
        with pytest.raises(ValueError, match=rf"^{store.url}/x: shard train/{shards[1]['file']} has another SHA-256"):
            read()
        # It could have been the way: a second copy was fetched.
        assert sum(method == "GET" and path.endswith(shards[1]["file"]) for method, path in store.requests) >= 2
    store.delete(key)
    with pytest.raises(FileNotFoundError, match=rf"^cannot download {store.url}/{key}: it does not exist"):
        read()
    assert not [path for path in tmp_path.rglob("*part-*") if ".part-" in path.name]
    store.put(key, whole)
    read()
