"""Whatever the files of pictures and of their datasets hold: they are read, or refused in one line."""

from __future__ import annotations

import json
import shutil

import pyarrow
import pytest
from hostile_data import signed
from hypothesis import given
from hypothesis import strategies as st
from mutations import fuzz, mutated, mutated_json, works_or_is_one_line
from pictures import encoded, pixels, prepare, samples, write_tar, write_tree
from pyarrow import parquet

from matmix.data.config import DataConfig, ImagesConfig
from matmix.data.images.decode import decode
from matmix.data.manifest import Manifest
from matmix.data.modalities import build_loader
from matmix.data.prepare.pictures.files import TarFile, read_table
from matmix.data.prepare.pictures.sources import ParquetFile

FILES = [encoded(pixels(1, 24, 24), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
TABLES = {"a.csv": b"image,label\n1.png,0\n2.png,owl\n", "a.json": b'{"1.png": 0}'}


@fuzz(200)
@given(data=st.data())
def test_pictures(data):
    changed = data.draw(mutated(data.draw(st.sampled_from(FILES))))
    works_or_is_one_line(lambda: decode(changed, megapixels=1.0))


@pytest.fixture(scope="module", params=["mds", "webdataset"])
def dataset(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return prepare(write_tree(folder / "tree", samples(2)), folder / "data", format=request.param)


def _read(path):
    config = DataConfig(images=ImagesConfig(path=str(path), size=4), workers=0, verify=False)
    list(build_loader(config, global_batch_size=6, micro_batch_size=6, one_pass=True))


def _signed(values):
    return signed({**values, "files": {}} if isinstance(values, dict) else values).encode()


@fuzz(80)
@given(data=st.data())
def test_datasets(dataset, tmp_path, data):
    path = tmp_path / "data"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(dataset, path)
    manifest = json.loads((path / "manifest.json").read_text())
    shard = manifest["splits"]["train"]["shards"][0]["file"]
    name = data.draw(st.sampled_from(["manifest.json", f"train/{shard}", f"train/{shard}", "train/lengths.npy"]))
    raw = (path / name).read_bytes()
    if name == "manifest.json":
        (path / name).write_bytes(data.draw(mutated_json(manifest).map(_signed)))
    else:
        changes = mutated(raw[:600]).map(lambda head: head + raw[600:])
        (path / name).write_bytes(data.draw(changes))
        (path / "manifest.json").write_bytes(_signed(manifest))
    works_or_is_one_line(lambda: _read(path))


@fuzz(80)
@given(data=st.data())
def test_manifests(dataset, data):
    values = json.loads((dataset / "manifest.json").read_text())
    values["options"] = {}
    works_or_is_one_line(lambda: Manifest.parse(data.draw(mutated_json(values).map(_signed)), "here"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    members = [("1.png", FILES[0]), ("1.cls", b"0"), ("2.jpg", FILES[1]), ("2.json", b'{"label": "owl"}')]
    write_tar(folder / "a.tar", members)
    parquet.write_table(pyarrow.table({"image": FILES, "label": [0, 1, 2, 0, 1, 2]}), folder / "a.parquet")
    return folder


@fuzz(120)
@given(data=st.data())
def test_sources(sources, tmp_path, data):
    name = data.draw(st.sampled_from(["a.tar", "a.parquet"]))
    raw = (sources / name).read_bytes()
    # Of the one the first header is changed, of the other the footer: changes of all can be gigabytes.
    changes = mutated(raw[:600]).map(lambda head: head + raw[600:])
    if name == "a.parquet":
        changes = mutated(raw[-600:]).map(lambda tail: raw[:-600] + tail)
    (tmp_path / name).write_bytes(data.draw(changes))

    def read():
        path = tmp_path / name
        source = TarFile(path, "label") if name == "a.tar" else ParquetFile(path, "image", "label")
        list(source.read(source.items()))

    works_or_is_one_line(read)


@fuzz(80)
@given(data=st.data())
def test_tables(data):
    name = data.draw(st.sampled_from(list(TABLES)))
    works_or_is_one_line(lambda: read_table(data.draw(mutated(TABLES[name])), name, "image", "label"))
