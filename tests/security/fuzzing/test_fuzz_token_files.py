"""Whatever files of tokens and their indices hold: they are read, or refused in one line."""

from __future__ import annotations

import json
import shutil

import pytest
import token_files
from hostile_data import signed
from hypothesis import given
from hypothesis import strategies as st
from mutations import fuzz, mutated, mutated_json, works_or_is_one_line

from matmix.data.indexing.command import index
from matmix.data.manifest import Manifest
from matmix.data.splits.reader import open_dataset

TEXTS = token_files.documents(12, longest=9)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(token_files.write_tokenizer(tmp_path_factory.mktemp("words")))


def files(folder):
    """One small file of each kind, and the index of the first."""
    token_files.write_megatron(folder / "a.bin", [[[*text, token_files.END]] for text in TEXTS])
    token_files.write_flat(folder / "b.npy", TEXTS, header=True)
    token_files.write_flat(folder / "c.bin", TEXTS)
    token_files.write_llm_c(folder / "d.bin", TEXTS)
    token_files.write_mds(folder / "bytes", TEXTS, "bytes", "<i8")
    token_files.write_mds(folder / "arrays", TEXTS, "ndarray:int32", "int32")
    token_files.write_litdata(folder / "lit", TEXTS, "<u2", "no_header_numpy:5")
    names = {"a.idx": "megatron", "a.bin": "megatron", "b.npy": "flat", "c.bin": "flat", "d.bin": "flat"}
    names |= {f"{kind}/shard.00000.mds": "mds" for kind in ("bytes", "arrays")}
    names |= {f"lit/{name}": "litdata" for name in ("chunk-0-0.bin", "index.json")}
    return {name: (layout, (folder / name).read_bytes()) for name, layout in names.items()}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return files(tmp_path_factory.mktemp("originals"))


def read_everything(folder):
    for split in Manifest.load(folder).splits:
        shards = open_dataset(str(folder), split, verify=False)
        for shard in range(shards.n_shards):
            for number in range(len(shards.lengths(shard))):
                yield shards.read(shard, number)


@fuzz(80)
@given(data=st.data())
def test_files_of_tokens(originals, tokenizer, tmp_path, data):
    name = data.draw(st.sampled_from(sorted(originals)))
    layout, raw = originals[name]
    folder = tmp_path / "home"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / name).parent.mkdir(parents=True)
    others = {"megatron": ("a.idx", "a.bin"), "litdata": ("lit/index.json", "lit/chunk-0-0.bin")}
    for other in others.get(layout, ()):
        (folder / other).write_bytes(originals[other][1])
    changed = mutated(raw) | mutated(raw[:400]).map(lambda head: head + raw[400:])
    if name.endswith(".json"):
        changed |= mutated_json(json.loads(raw)).map(lambda values: json.dumps(values).encode())
    (folder / name).write_bytes(data.draw(changed))

    def use():
        index(str(folder), format=layout, tokenizer=tokenizer, validation_fraction=0.0)
        assert all(ids.min() >= 0 and ids.max() < token_files.VOCAB_SIZE for ids in read_everything(folder))

    works_or_is_one_line(use)
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


@pytest.fixture(scope="module")
def dataset(originals, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed") / "data"
    folder.mkdir()
    for name in ("a.idx", "a.bin"):
        (folder / name).write_bytes(originals[name][1])
    index(str(folder), format="megatron", tokenizer=tokenizer, validation_fraction=0.3)
    return folder


@fuzz(15)
@given(data=st.data())
def test_lists_of_the_files_of_an_index(originals, tokenizer, tmp_path, data):
    """Whatever it says, nothing but files with the names of an index is overwritten or removed."""
    home = tmp_path / "home"
    shutil.rmtree(home, ignore_errors=True)
    (home / "validation").mkdir(parents=True)
    others = {name: originals[name][1] for name in ("a.idx", "a.bin")} | {"validation/notes.npy": b"mine"}
    for name, raw in others.items():
        (home / name).write_bytes(raw)
    names = ["train/lengths.npy", "validation/starts.npy", "a.bin", "validation", "validation/notes.npy", "../x"]
    (tmp_path / "x").touch()
    record = data.draw(mutated_json(names).map(lambda values: json.dumps(values).encode()) | mutated(b'["a.bin"]'))
    (home / ".index.json").write_bytes(record)
    works_or_is_one_line(lambda: index(str(home), format="megatron", tokenizer=tokenizer, validation_fraction=0.0))
    assert {name: (home / name).read_bytes() for name in others} == others
    assert {path.name for path in tmp_path.iterdir()} == {"home", "x"}


@fuzz(50)
@given(data=st.data())
def test_manifests_of_indices(dataset, tmp_path, data):
    raw = (dataset / "manifest.json").read_bytes()
    changed = data.draw(mutated(raw) | mutated_json(json.loads(raw)).map(lambda values: signed(values).encode()))
    folder = tmp_path / "home"
    if not folder.exists():
        shutil.copytree(dataset, folder)
    (folder / "manifest.json").write_bytes(changed)
    works_or_is_one_line(lambda: list(read_everything(folder)))
