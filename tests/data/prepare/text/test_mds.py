"""Text from MDS directories that others wrote."""

import itertools
import json

import numpy as np
import pytest
from failures import each
from foreign import write_mds

from matmix.data.prepare.base import Malformed, find_cuts, read_chunks
from matmix.data.prepare.text import ReadOptions, sources
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources

TEXTS = [f"text {i} é 😀 " + "word " * (i % 9) for i in range(50)]
COLUMNS = {"text": "str", "id": "int", "body": "bytes", "a": "pkl"}
ROWS = [{"text": t, "id": i, "body": t.upper().encode(), "a": b"no pickle"} for i, t in enumerate(TEXTS)]


def documents(*inputs, start=None, stop=None, **options):
    found, _ = find_sources([str(i) for i in inputs], ReadOptions(**options))
    return [d for chunk in read_chunks(found, start, stop) for d in documents_of(chunk)]


@each("zstd", [False, True])
def test_columns_of_strings_and_bytes(tmp_path, monkeypatch, zstd):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    folder = write_mds(tmp_path / "in" / "train", ROWS, COLUMNS, shards=3, zstd=zstd)
    assert documents(folder) == TEXTS
    assert documents(tmp_path / "in", text_field="body") == [text.upper() for text in TEXTS]
    assert documents(folder, template="{body}\\n{text}") == [f"{text.upper()}\n{text}" for text in TEXTS]
    cuts = find_cuts(find_sources([str(folder)])[0], 4)
    parts = [documents(folder, start=a, stop=b) for a, b in itertools.pairwise(cuts)]
    assert list(itertools.chain(*parts)) == TEXTS
    assert all(parts)


def test_an_index_above_several_directories(tmp_path):
    shards = []
    for name in ("a", "b"):
        write_mds(tmp_path / name, ROWS, COLUMNS)
        for shard in json.loads((tmp_path / name / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
            shards.append(shard)
        (tmp_path / name / "index.json").unlink()
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    assert documents(tmp_path) == TEXTS * 2


def test_directories_that_cannot_be_used(tmp_path):
    folder = write_mds(tmp_path / "a", [*ROWS, {**ROWS[0], "body": b"\xff"}], COLUMNS)
    assert documents(folder, text_field="body")[-1] == Malformed(26, "column 'body' is not UTF-8 (byte 1)")
    with pytest.raises(ValueError, match=r"no column 'content'; its columns are a, body, id, text \(choose one"):
        documents(folder, text_field="content")
    for name, kind in (("id", "int"), ("a", "pkl")):
        with pytest.raises(ValueError, match=rf"column '{name}' of .* is {kind}, not string; those of text are: bo"):
            documents(folder, text_field=name)
    whole, index = (folder / "shard.00001.mds").read_bytes(), json.loads((folder / "index.json").read_text())
    for raw in (b"", whole[:300], b"\xff" + whole[1:], whole[:-9]):
        (folder / "shard.00001.mds").write_bytes(raw)
        with pytest.raises(ValueError, match=r"a/shard\.00001\.mds is damaged: (it does not begin|sample \d+ )"):
            documents(folder)
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(FileNotFoundError, match=r"a lacks the shard shard\.00001\.mds, which its index\.json lists"):
        documents(folder)
    for change, message in (
        ({"version": 3}, "newer version of mosaicml-streaming: version 3 is not known"),
        ({"samples": "many"}, "a shard lacks a key"),
        ({"column_sizes": [None]}, "have not one name, encoding and size each"),
        ({"raw_data": {"basename": "../x.mds", "bytes": 1}}, r"\.\./x\.mds"),
    ):
        changed = {"version": 2, "shards": [{**index["shards"][0], **change}]}
        (folder / "index.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            documents(folder)
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match=r"stands in no index\.json beside it"):
        documents(folder / "shard.00000.mds")


def test_a_compressed_shard_is_as_large_as_it_says(tmp_path):
    folder = write_mds(tmp_path / "a", ROWS, COLUMNS, shards=1, zstd=True)
    index = json.loads((folder / "index.json").read_text())
    for change, message in (
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 2000}}, "has not the 2,000 bytes of its index"),
        ({"compression": "br:3"}, r"is compressed by 'br:3', and zstd and gz are read: decompress it first"),
    ):
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [{**index["shards"][0], **change}]}))
        with pytest.raises(ValueError, match=message):
            documents(folder)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
def test_directories_that_streaming_wrote(tmp_path, compression):
    from streaming import MDSWriter

    columns = {"text": "str", "id": "int", "body": "bytes", "a": "pkl", "j": "json", "x": "ndarray:int16"}
    with MDSWriter(out=str(tmp_path / "a"), columns=columns, compression=compression, size_limit=1 << 12) as out:
        for row in ROWS:
            out.write({**row, "a": {1: 2}, "j": {"k": row["id"]}, "x": np.arange(row["id"] + 1, dtype=np.int16)})
    assert len(list((tmp_path / "a").iterdir())) > 3
    assert documents(tmp_path / "a") == TEXTS
    assert documents(tmp_path / "a", text_field="body") == [text.upper() for text in TEXTS]
