"""Text from datasets of the Hugging Face hub: from a clone, and from a server that answers as the hub does."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import serving
from huggingface_hub import constants

from matmix.data.manifest import Manifest
from matmix.data.prepare.base import find_cuts, read_chunks
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig, ReadOptions, sources
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.hub import pinned
from matmix.data.prepare.text.readers import find_sources
from matmix.data.storage.remote import RemoteError

EN = [[f"text {file} {i} é " + "word " * (i % 9) for i in range(40)] for file in range(3)]
DE = [f"Text {i}" for i in range(9)]
README = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train-*}
  - {split: validation, path: en/validation.json.gz}
- {config_name: de, data_files: de/*.json}
---
"""


def repository(folder: Path) -> Path:
    """Writes what lies in a repository of the hub: two configurations, one with two splits."""
    for name in ("en", "de"):
        (folder / name).mkdir(parents=True)
    for number, texts in enumerate(EN):
        lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
        (folder / f"en/train-{number:05}.json.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    shutil.copy(folder / "en/train-00000.json.gz", folder / "en/validation.json.gz")
    (folder / "de/data.json").write_text("\n".join(json.dumps({"text": text}) for text in DE))
    (folder / "README.md").write_text(README)
    return folder


def documents(item, start=None, stop=None, **options):
    found, _ = find_sources([str(item)], ReadOptions(**options))
    return [d for chunk in read_chunks(found, start, stop) for d in documents_of(chunk)]


def options(item, out):
    return PrepareConfig(inputs=(item,), out=str(out), tokenizer="bytes", validation_fraction=0, compression="none")


def test_a_clone_is_read_as_load_dataset_streams_it(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    item = f"hub:{repository(tmp_path / 'clone')}"
    given = datasets.load_dataset(str(tmp_path / "clone"), "en", split="train", streaming=True)
    texts = [row["text"] for row in given]
    assert documents(f"{item}:en:train") == texts == list(itertools.chain(*EN))
    assert documents(f"{item}:de") == documents(f"{item}:de:train", template="{text}") == DE
    # From the middle of a file; in parts, which are whole files.
    found, _ = find_sources([f"{item}:en:train"], ReadOptions())
    chunks = list(read_chunks(found))
    assert len(chunks) > 6
    done, position = len(chunks[0].records), chunks[0].end
    assert documents(f"{item}:en:train", start=position) == texts[done:]
    assert [cut.offset for cut in find_cuts(found, 3)] == [0] * 4
    parts = [documents(f"{item}:en:train", a, b) for a, b in itertools.pairwise(find_cuts(found, 2))]
    assert [len(part) for part in parts] == [80, 40]
    with pytest.raises(
        ValueError, match=r"train-0000..json.gz would be cut.*as many parts as the split has files \(3\), or"
    ):
        find_cuts(found, 4)

    for words, message in {
        "": "has several configurations; name one of en, de, as in hub:",
        ":fr": "has no configuration fr; name one of en, de",
        ":fr:train": "has no configuration fr",
        ":en": "has several splits; name one of train, validation, as in hub:.*clone:en:train",
        ":en:test": "has no split test; name one of train, validation",
        ":en:train:1": r"is not hub:NAME\[@REVISION\]",
        "/absent": "is no folder",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            documents(item + words)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="--raw-bytes reads files of this machine"):
        documents(f"{item}:de", raw_bytes=True)


def test_kinds_of_files(tmp_path):
    meta = pa.array([{"by": None if i == 2 else f"author {i}"} for i in range(len(DE))])
    table = pa.table({"body": DE, "meta": meta, "label": range(len(DE))})
    for kind in ("parquet", "csv", "txt"):
        (tmp_path / kind).mkdir()
    pq.write_table(table, tmp_path / "parquet/data.parquet", row_group_size=4)
    (tmp_path / "csv/data.csv").write_text("\n".join(["text", *DE]))
    (tmp_path / "txt/data.txt").write_text("\n".join(DE))
    item = f"hub:{tmp_path}/parquet"
    assert documents(item, text_field="body") == documents(f"hub:{tmp_path}/csv") == documents(f"hub:{tmp_path}/txt")
    assert documents(item, text_field="body") == DE
    authors = documents(item, text_field="meta.by")
    assert authors == ["" if i == 2 else f"author {i}" for i in range(len(DE))]
    for field, message in {
        "text": "no column 'text'; its columns are body, meta",
        "label": "int64, not string",
    }.items():
        with pytest.raises(ValueError, match=message):
            documents(item, text_field=field)


def test_what_is_begun_goes_on_with_its_commit(tmp_path, monkeypatch):
    old, new = repository(tmp_path / "old"), repository(tmp_path / "new")
    shutil.copy(old / "en/train-00001.json.gz", new / "en/train-00000.json.gz")
    name = ("datasets", "someone/texts")
    folders = {(*name, "1" * 40): old}
    with serving(folders) as hub:
        hub.enter(monkeypatch, tmp_path / "cache")
        item, out = "hub:someone/texts:en:train", tmp_path / "out"
        manifest = prepare(options(item, out))
        beginning = "hf://datasets/someone/texts@" + "1" * 40
        assert [source["path"] for source in manifest.sources] == [
            f"{beginning}/en/train-{number:05}.json.gz" for number in range(3)
        ]
        prepare(options(f"hub:{old}:en:train", tmp_path / "clone"))
        shards = [(tmp_path / name / "train/shard.00000.mds").read_bytes() for name in ("out", "clone")]
        assert shards[0] == shards[1]
        # The hub moves on. What is stopped in the middle is not another dataset afterwards, nor is what is finished.
        hub.folders[(*name, "2" * 40)], hub.main[name] = new, "2" * 40
        assert prepare(options(item, out)).sources == manifest.sources
        (tmp_path / "stopped/.prepare").mkdir(parents=True)
        (tmp_path / "stopped/.prepare/options.json").write_text(json.dumps(manifest.options))
        assert prepare(options(item, tmp_path / "stopped")).sources == manifest.sources
        asked = [prepare(options(f"hub:someone/texts{at}:en:train", tmp_path / f"other{at}")) for at in ("", "@main")]
        assert asked[0].sources == asked[1].sources != manifest.sources
        part = dataclasses.replace(options(item, tmp_path / "parts"), part="1/3")
        assert [source["documents"] for source in prepare(part).sources] == [40, 0, 0]
        begun = json.loads((tmp_path / "parts/parts/options.json").read_text())
        assert begun["arguments"][0] == f"hub:someone/texts@{'2' * 40}:en:train"

        hub.asked.clear()
        for given, message in {
            "hub:someone/else": "shows you no dataset of that name; for a private one set HF_TOKEN",
            "hub:gated/texts": "is gated: ask for access at https://huggingface.co/datasets/gated/texts, then set HF_",
            "hub:someone/texts@v9": "the dataset has no such revision",
        }.items():
            with pytest.raises(FileNotFoundError, match=message) as caught:
                pinned(given, "")
            assert "\n" not in str(caught.value)
        assert len(hub.asked) == 3
    with pytest.raises(
        RemoteError, match=r"hub cannot be read \(.*without a network, give hub:FOLDER with a copy"
    ) as no:
        pinned(item, "")
    assert "\n" not in str(no.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="hub cannot be read"):
        pinned(item, "")
    assert Manifest.load(out).sources == manifest.sources


def test_datasets_that_are_not_to_be_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("secret.txt").write_text("hunter2")
    code, config = "open('executed', 'w')", "---\nconfigs:\n- {{config_name: a, data_files: {}}}\n---\n"
    newer = "---\ndataset_info: {features: [{name: a, dtype: hologram}]}\n---\n"
    for name, files, message in [
        (
            "elsewhere",
            {"README.md": config.format(tmp_path / "secret.txt")},
            "names the file .*, which is none of its own",
        ),
        ("above", {"README.md": config.format("../secret.txt")}, "none of its own|cannot be read"),
        ("script", {"script.py": code, "a.txt": "a"}, "cannot be read .RuntimeError: Dataset scripts are no longer"),
        ("tars", {"a.tar": "no tar file"}, "of the kind webdataset, and of those at a hub parquet, arrow, json, csv"),
        ("pickles", {"a.pkl": "cposix\nsystem\n(S'touch executed'\ntR."}, "cannot be read"),
        ("empty", {}, "cannot be read"),
        ("broken", {"a.parquet": "PAR1"}, "cannot be read"),
        ("newer", {"README.md": newer, "a.txt": "a"}, "cannot be read .ValueError: Feature type 'Hologram' not found"),
    ]:
        Path(name).mkdir()
        for file, content in files.items():
            Path(name, file).write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            documents(f"hub:./{name}")
        assert "\n" not in str(caught.value)
        assert "hunter2" not in str(caught.value)
    assert not Path("executed").exists()
