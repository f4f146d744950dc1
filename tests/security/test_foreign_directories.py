"""Directories that others made, read while training: whatever is in them, nothing runs, and one line says so."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import shutil
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import fuzz, mutated, mutated_json, works_or_is_one_line
from streaming import MDSWriter

from matmix.data.config import DataConfig
from matmix.data.modalities import build_loader


class Payload:
    def __reduce__(self):
        return pytest.fail, ("what a file holds was run",)


def read(path, reader, **options):
    data = DataConfig(path=str(path), reader=reader, tokenizer="bytes", seqlen=16, workers=0, **options)
    loader = build_loader(data, global_batch_size=2, micro_batch_size=2)
    return list(itertools.islice(loader, 12))


def refused(path, reader, **options):
    with pytest.raises((ValueError, OSError)) as raised:
        read(path, reader, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def mds(folder):
    with MDSWriter(out=str(folder), columns={"text": "str", "ids": "ndarray:int32"}) as writer:
        for number in range(20):
            writer.write({"text": f"text {number} of many", "ids": np.arange(number + 1, dtype=np.int32)})
    return folder


def tar_of(**members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number, (name, content) in itertools.product(range(6), members.items()):
            info = tarfile.TarInfo(f"{number}.{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_nothing_is_unpickled(tmp_path):
    objects = io.BytesIO()
    np.save(objects, np.array([Payload()], dtype=object), allow_pickle=True)
    whole = tar_of(txt=b"a text", pkl=pickle.dumps(Payload()), pth=pickle.dumps(Payload()), npy=objects.getvalue())
    (tmp_path / "a.tar").write_bytes(whole)
    assert len(read(tmp_path, "webdataset")) == 12
    assert "is no array" in refused(tmp_path, "webdataset", text_field="npy")
    folder = mds(tmp_path / "mds")
    index = json.loads((folder / "index.json").read_bytes())
    for encoding in ("pkl", "pil", "list[int]", "no such"):
        index["shards"][0]["column_encodings"] = [encoding, "str"]
        (folder / "index.json").write_text(json.dumps(index))
        refused(folder, "streaming", text_field="ids")
    index["shards"][0]["column_encodings"] = ["jpeg", "str"]  # of a column that nobody asks for
    (folder / "index.json").write_text(json.dumps(index))
    assert len(read(folder, "streaming")) == 12


def test_an_index_leads_nowhere_else(tmp_path):
    folder = mds(tmp_path / "mds")
    index = json.loads((folder / "index.json").read_bytes())
    for name in ("../outside.mds", "/etc/passwd", "a\nb"):
        index["shards"][0]["raw_data"]["basename"] = name
        (folder / "index.json").write_text(json.dumps(index))
        assert "damaged or not to be trusted" in refused(folder, "streaming")


@pytest.mark.slow
@fuzz(60)
@given(data=st.data())
def test_changed_files(tmp_path, data):
    """They are read, or refused in one line."""
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
    folder = mds(tmp_path / "home")
    (folder / "a.tar").write_bytes(tar_of(txt=b"a text", json=b'{"text": "b"}'))
    file = folder / data.draw(st.sampled_from(["index.json", "shard.00000.mds", "a.tar"]))
    raw = file.read_bytes()
    changed = mutated(raw)
    if file.suffix == ".json":
        changed |= mutated_json(json.loads(raw)).map(lambda value: json.dumps(value).encode())
    file.write_bytes(data.draw(changed))
    reader = "webdataset" if file.suffix == ".tar" else "streaming"
    works_or_is_one_line(lambda: read(folder, reader, text_field=data.draw(st.sampled_from(["text", "ids"]))))
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
