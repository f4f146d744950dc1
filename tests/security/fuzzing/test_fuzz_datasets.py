"""Whatever the files of a prepared dataset hold: it is read, or refused in one line; nothing is written elsewhere."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
from folders import contents
from hostile_data import prepared, signed
from hypothesis import given
from hypothesis import strategies as st
from mutations import fuzz, mutated, mutated_json, works_or_is_one_line

from matmix.data.arrays import read_vector
from matmix.data.manifest import Manifest
from matmix.data.prepare.merge import merge
from matmix.data.prepare.parts import Parts, read_spans
from matmix.data.prepare.text.preparation import TextPreparation
from matmix.data.splits.reader import open_dataset


def _signed(values):
    return signed(values).encode()


@pytest.fixture(scope="module", params=["mds", "webdataset"])
def dataset(request, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("fuzz"), format=request.param, compression="none")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("fuzz"))


def read_everything(path, cache):
    for name in Manifest.load(path).splits:
        shards = open_dataset(str(path), name, cache_dir=str(cache), verify=False)
        for shard in range(min(shards.n_shards, 2)):
            for index in range(min(len(shards.lengths(shard)), 3)):
                shards.read(shard, index)


@fuzz(120)
@given(data=st.data())
def test_manifests(packed, tmp_path, data):
    raw = (packed / "manifest.json").read_bytes()
    changed = data.draw(mutated(raw) | mutated_json(json.loads(raw)).map(_signed))
    works_or_is_one_line(lambda: Manifest.parse(changed, "here"))
    path = tmp_path / "home" / "data"
    if not path.exists():
        shutil.copytree(packed, path)
    (path / "manifest.json").write_bytes(changed)
    before = contents(tmp_path / "home")
    works_or_is_one_line(lambda: read_everything(path, tmp_path / "cache"))
    assert contents(tmp_path / "home") == before
    assert {file.name for file in tmp_path.iterdir()} <= {"home", "cache"}


def _with_digests(path):
    """What the manifest says of files fits them again, as that of someone who means harm does."""
    values = json.loads((path / "manifest.json").read_text())
    for name in values["files"]:
        values["files"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    for name, split in values["splits"].items():
        for shard in split["shards"]:
            raw = (path / name / shard["file"]).read_bytes()
            digest = hashlib.sha256(raw).hexdigest()
            shard.update(bytes=len(raw), sha256=digest, raw_bytes=len(raw), raw_sha256=digest)
    (path / "manifest.json").write_text(signed(values))


@fuzz(100)
@given(data=st.data())
def test_files_of_a_dataset(dataset, tmp_path, data):
    path = tmp_path / "home" / "data"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(dataset, path)
    first = Manifest.load(path).splits["train"].shards[0].file
    name = data.draw(st.sampled_from([f"train/{first}", f"train/{first}", "train/lengths.npy", "train/index.json"]))
    raw = (path / name).read_bytes()
    changes = mutated(raw)
    if name.endswith(".json"):
        changes = changes | mutated_json(json.loads(raw)).map(_signed)
    elif not name.endswith(".npy"):
        changes = changes | mutated(raw[:4096]).map(lambda head: head + raw[4096:])
    (path / name).write_bytes(data.draw(changes))
    _with_digests(path)
    works_or_is_one_line(lambda: read_everything(path, tmp_path / "cache"))


@fuzz(150)
@given(data=st.data())
def test_arrays(packed, tmp_path, data):
    raw = (packed / data.draw(st.sampled_from(["token_histogram.npy", "train/lengths.npy"]))).read_bytes()
    file = tmp_path / "a.npy"
    file.write_bytes(data.draw(mutated(raw) | mutated(raw[:128]).map(lambda head: head + raw[128:])))
    works_or_is_one_line(lambda: read_vector(file, "int64", "here"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    from matmix.data.prepare.command import prepare
    from matmix.data.prepare.text import PrepareConfig

    folder = tmp_path_factory.mktemp("parts")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"verse {n} of the king"}) + "\n" for n in range(80)))
    for number in (1, 2):
        options = {"vocab_size": 290, "validation_fraction": 0.2, "processes": 1, "part": f"{number}/2"}
        prepare(PrepareConfig(inputs=(str(folder / "a.jsonl"),), out=str(folder / "out"), **options), summary=False)
    return folder / "out"


@fuzz(60)
@given(data=st.data())
def test_parts_of_a_preparation(parts, tmp_path, data):
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(parts, out)
    part = "parts/part-00002-of-00002"
    names = ["parts/options.json", "parts/cuts.json", f"{part}/part.json", f"{part}/manifest.json"]
    file = out / data.draw(st.sampled_from(names))
    raw = file.read_bytes()
    file.write_bytes(data.draw(mutated(raw) | mutated_json(json.loads(raw)).map(_signed)))
    works_or_is_one_line(lambda: Parts(str(out), TextPreparation).facts())
    works_or_is_one_line(lambda: read_spans(out / part))
    works_or_is_one_line(lambda: merge(str(out), TextPreparation))
    assert {entry.name for entry in tmp_path.iterdir()} == {"out"}
