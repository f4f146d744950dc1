"""A format of shards from outside: one class and its name in the registry, and everything else works with it."""

from __future__ import annotations

import io
import itertools
import json
import shutil

import numpy as np
import pytest
from folders import contents

from matmix.data.config import DataConfig
from matmix.data.formats import FORMATS, mds
from matmix.data.formats.base import DamagedShard, OpenShard, ShardFormat, damaged
from matmix.data.manifest import Manifest
from matmix.data.modalities import build_loader
from matmix.data.prepare import command
from matmix.data.prepare.merge import merge
from matmix.data.prepare.text import PrepareConfig
from matmix.data.prepare.text.preparation import TextPreparation
from matmix.data.splits.reader import open_dataset
from matmix.data.tokenizer import Tokenizer


class Npy(ShardFormat):
    """One array in a shard: the number of tokens of each document, then all tokens."""

    suffix = ".npy"
    shard_overhead = 128

    def file_name(self, shard):
        return f"tokens-{shard:05}.npy"

    def document_bytes(self, tokens):
        return 4 + 4 * tokens

    def encode(self, documents, first):
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate([[len(d) for d in documents], *documents]).astype("<u4"), allow_pickle=False)
        return buffer.getvalue()

    @classmethod
    def open_shard(cls, path, shard, *, dtype, where, index):
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            raise damaged(where, "it is no array") from None
        if values.shape != (shard.documents + shard.tokens,):
            raise damaged(where, f"it has the shape {values.shape}")
        return OpenNpy(values, shard.documents, dtype)


class OpenNpy(OpenShard):
    def __init__(self, values, documents, dtype):
        self.tokens, self.dtype = values[documents:], dtype
        self.ends = np.cumsum(values[:documents])

    def read(self, index, length):
        return self.tokens[self.ends[index] - length : self.ends[index]].astype(self.dtype)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(FORMATS, "npy", Npy)


@pytest.fixture
def texts(tmp_path):
    made = [f"verse {n} of {n * 7919 % 1000} kings" for n in range(300)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in made))
    return made


def options(tmp_path, out="out", **changes):
    chosen = {"format": "npy", "vocab_size": 300, "validation_fraction": 0.2, "shard_megabytes": 0.002, "processes": 1}
    return PrepareConfig(inputs=(str(tmp_path / "in.jsonl"),), out=str(tmp_path / out), **{**chosen, **changes})


def everything(shards):
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


def expected(folder, tokenizer, texts):
    """The documents of both splits, in the order of the splits, are those of the text."""
    found = [everything(open_dataset(str(folder), split)) for split in ("train", "validation")]
    assert sorted(tokenizer.decode(ids) for split in found for ids in split) == sorted(texts)
    return found[0]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_prepared_read_and_cached(tmp_path, texts, registered, compression):
    manifest = command.prepare(options(tmp_path, compression=compression), summary=False)
    out, cache = tmp_path / "out", tmp_path / "cache"
    assert manifest.format == "npy"
    assert len(manifest.splits["train"].shards) > 3
    documents = expected(out, Tokenizer.load(out), texts)
    remote = open_dataset(out.as_uri(), cache_dir=str(cache), keep_open=1, cache_bytes=5000)
    assert everything(remote) == documents
    kept = {path.name for path in cache.rglob("train/*.npy")}
    assert "lengths.npy" in kept  # which is no shard, whatever its suffix
    assert "tokens-00000.npy" not in kept
    first = manifest.splits["train"].shards[0].file.removesuffix(".zst")
    assert remote.read(0, 0).tolist() == documents[0]
    (copy,) = cache.rglob(f"train/{first}")
    copy.write_bytes(copy.read_bytes()[:-1] + b"!")  # damaged in the cache: made again when it is opened anew
    assert everything(open_dataset(out.as_uri(), cache_dir=str(cache))) == documents
    loader = build_loader(DataConfig(path=str(out), seqlen=16, workers=1), global_batch_size=4, micro_batch_size=4)
    batches = list(itertools.islice(loader, 3))
    loader.close()
    assert all(batch.n_tokens == 4 * 17 or batch.n_tokens == 4 * 16 for batch in batches)


def test_a_damaged_shard_is_named(tmp_path, texts, registered):
    manifest = command.prepare(options(tmp_path, compression="none"), summary=False)
    shard = manifest.splits["train"].shards[1]
    path = tmp_path / "out" / "train" / shard.file
    path.write_bytes(b"\xff" * shard.bytes)
    with pytest.raises(DamagedShard, match=f"shard train/{shard.file} has another SHA-256"):
        everything(open_dataset(str(tmp_path / "out")))
    with pytest.raises(DamagedShard, match=f"shard train/{shard.file} is damaged: it is no array"):
        everything(open_dataset(str(tmp_path / "out"), verify=False))


def test_stopped_and_continued_and_in_parts(tmp_path, texts, registered, monkeypatch):
    monkeypatch.setattr(command, "STATE_SECONDS", 0)
    monkeypatch.setattr(command, "STATE_SHARE", float("inf"))
    monkeypatch.setattr("matmix.data.prepare.text.sources.CHUNK_BYTES", 1500)
    command.prepare(options(tmp_path), summary=False)
    work, chunks = command.work_in_order, itertools.count()

    def stopped(*arguments, **options):
        for result in work(*arguments, **options):
            if next(chunks) == 4:
                raise KeyboardInterrupt
            yield result

    monkeypatch.setattr(command, "work_in_order", stopped)
    with pytest.raises(KeyboardInterrupt):
        command.prepare(options(tmp_path, "again"), summary=False)
    assert not (tmp_path / "again" / "manifest.json").exists()
    command.prepare(options(tmp_path, "again"), summary=False)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    for part in ("1/2", "2/2"):
        command.prepare(options(tmp_path, "parts", part=part), summary=False)
    assert merge(str(tmp_path / "parts"), TextPreparation).format == "npy"
    whole, joined = (
        everything(open_dataset(str(tmp_path / name), cache_dir=str(tmp_path / "cache"))) for name in ("out", "parts")
    )
    assert joined == whole


def test_names_of_formats_are_looked_up_and_nothing_else(tmp_path, texts, registered, monkeypatch):
    command.prepare(options(tmp_path), summary=False)
    with pytest.raises(ValueError, match=r"format must be one of mds, webdataset, npy, got 'tests\.x:Npy'"):
        options(tmp_path, format="tests.x:Npy")
    monkeypatch.delitem(FORMATS, "npy")
    with pytest.raises(ValueError, match=r"says format 'npy'; readable are mds, webdataset"):
        Manifest.load(tmp_path / "out")


def test_the_index_is_parsed_once(small, data, tmp_path, monkeypatch):
    path = shutil.copytree(small, tmp_path / "data")
    parsed, read = [], mds.read_json
    monkeypatch.setattr(mds, "read_json", lambda file: parsed.append(file) or read(file))
    shards = open_dataset(str(path), keep_open=2)
    for _ in range(2):
        assert everything(shards) == [d.tolist() for d in data.documents(43)]
    assert len(parsed) == 1
