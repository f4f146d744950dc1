"""Text from tables that others wrote: several columns, nested ones, and folders of the library `datasets`."""

import itertools
import json

import pyarrow as pa
import pytest
from failures import each
from foreign import save_to_disk, write_table

from matmix.data.prepare.base import Malformed, find_cuts, read_chunks
from matmix.data.prepare.text import ReadOptions, sources
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources

TEXTS = [f"text {i} é 😀 " + "word " * (i % 9) for i in range(60)]
TITLES = [None if i % 7 == 0 else f"title {i}" for i in range(60)]
TABLE = pa.table(
    {
        "title": pa.array(TITLES).dictionary_encode(),
        "text": pa.array(TEXTS, pa.large_string()),
        "meta": pa.array([None if i == 5 else {"by": f"author {i}", "year": i} for i in range(60)]),
        "meta.by": pa.array(["first"] * 60),
        "other.name": pa.array(["dotted"] * 60),
        "year": range(60),
    }
).cast(
    pa.schema(
        [
            ("title", pa.dictionary(pa.int32(), pa.string())),
            ("text", pa.large_string()),
            ("meta", pa.struct([("by", pa.large_string()), ("year", pa.int64())])),
            ("meta.by", pa.string()),
            ("other.name", pa.string()),
            ("year", pa.int64()),
        ]
    )
)


def documents(*inputs, start=None, stop=None, **options):
    found, _ = find_sources([str(i) for i in inputs], ReadOptions(**options))
    return [d for chunk in read_chunks(found, start, stop) for d in documents_of(chunk)]


def write(path, table=TABLE, **options):
    return write_table(path, table, **options)


@each("name", ["a.parquet", "a.arrow", "file.arrow"])
def test_columns(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    path = write(tmp_path / name, TABLE.drop(["meta.by"]), stream=name == "a.arrow")
    assert documents(path) == TEXTS
    assert documents(path, text_field="title") == [title or "" for title in TITLES]
    assert documents(path, text_field="other.name") == ["dotted"] * 60
    assert documents(path, text_field="meta.by") == ["" if i == 5 else f"author {i}" for i in range(60)]
    # A column of this name goes before a field of another.
    assert documents(write(tmp_path / f"b{name}", stream=name == "a.arrow"), text_field="meta.by") == ["first"] * 60
    joined = [f"{title or ''}\n{{{text}}}\n" for title, text in zip(TITLES, TEXTS, strict=True)]
    assert documents(path, template="{title}\\n{{{text}}}\n") == joined


def test_a_template_of_json_fields(tmp_path):
    rows = [
        {"q": "Who?", "a": {"best": "I"}},
        {"q": "What?", "a": {}},
        {"q": " ", "a": {"best": ""}},
        {"q": 3, "a": {}},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = documents(tmp_path / "a.jsonl", template="{q} {a.best}.")
    missing = "no field 'a.best' (its fields: q, a)"
    assert found == ["Who? I.", Malformed(2, missing), "", Malformed(4, missing)]
    with pytest.raises(ValueError, match=r"template 'no field' names no fields, such as"):
        documents(tmp_path / "a.jsonl", template="no field")
    with pytest.raises(ValueError, match=r"template '\{a' names no fields, such as '\{title\} \{text\}' \(expected"):
        documents(tmp_path / "a.jsonl", template="{a")


@pytest.mark.parametrize("coded", [False, True])
def test_text_that_is_not_utf8_is_a_malformed_row(tmp_path, coded):
    column = pa.array([b"one", b"\xff\xfe", b"two"]).view(pa.string())
    table = pa.table({"text": column.dictionary_encode() if coded else column})
    one, bad, two = documents(write(tmp_path / "a.parquet", table))
    assert (one, two) == ("one", "two")
    assert bad == Malformed(2, "column 'text' is not UTF-8 (byte 1)")


def test_columns_that_are_no_text(tmp_path):
    for name in ("a.parquet", "a.arrow"):
        path = write(tmp_path / name, TABLE.drop(["meta.by"]))
        known = "those of text are: title, text, other.name, meta.by"
        with pytest.raises(ValueError, match=rf"column 'year' of .*{name} is int64, not string; {known}$"):
            documents(path, text_field="year")
        with pytest.raises(ValueError, match=r"no column 'body'; its columns are title, text, meta, other.name, year"):
            documents(path, template="{title} {body}")
        with pytest.raises(ValueError, match=r"no column 'meta.to'; its columns are .*, meta.by, meta.year "):
            documents(path, text_field="meta.to")
        with pytest.raises(ValueError, match=r"row 5, is longer than"):
            documents(path, max_line_megabytes=len(TEXTS[3].encode()) / 2**20)


def test_folders_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    folder = save_to_disk(tmp_path / "saved" / "train", TABLE)
    save_to_disk(tmp_path / "saved" / "test", TABLE)
    (folder / "data-00009-of-00009.arrow").write_bytes(b"not listed")
    assert documents(folder) == TEXTS
    cuts = find_cuts(find_sources([str(folder)])[0], 3)
    parts = [documents(folder, start=a, stop=b) for a, b in itertools.pairwise(cuts)]
    assert list(itertools.chain(*parts)) == TEXTS
    assert all(parts)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=rf"saved holds the splits test, train; name one: {tmp_path}/saved/test$"):
        documents(tmp_path / "saved")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "dataset_info.json").write_text('{"splits": {"train": {}, "test": {}}}')
    for name in ("set-train-00000-of-00002", "set-train-00001-of-00002", "cache-0123"):
        write(cache / f"{name}.arrow")
    assert documents(cache) == TEXTS * 2
    write(cache / "set-test.arrow")
    with pytest.raises(ValueError, match=rf"the splits train, test; name the files of one: '{cache}/\*-train\*.arrow'"):
        documents(cache)
    assert documents(f"{cache}/*-train*.arrow") == TEXTS * 2


def test_a_folder_of_a_newer_version_gives_its_texts(tmp_path):
    """Unknown members and features do not concern the columns of text. The folder is the installed library's own."""
    from datasets import Dataset

    Dataset.from_dict({"text": TEXTS, "other": TEXTS}).save_to_disk(tmp_path / "a", num_shards=2)
    assert documents(tmp_path / "a") == TEXTS
    for name, new in {"state": {"_engine": 7}, "dataset_info": {"features": {"other": {"_type": "Hologram"}}}}.items():
        path = tmp_path / "a" / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **new}))
    assert documents(tmp_path / "a") == TEXTS


def test_arrow_that_cannot_be_used(tmp_path):
    folder = save_to_disk(tmp_path / "a", TABLE)
    (folder / "state.json").write_text('{"version": 7, "files": []}')
    with pytest.raises(ValueError, match=r"a is damaged, or of a newer version of datasets: its state.json does not"):
        documents(folder)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(ValueError, match=r"a is damaged, .*secret\.arrow"):
        documents(folder)
    whole = write(tmp_path / "b.arrow").read_bytes()
    for raw in (b"", b"nothing of the kind", whole[: len(whole) // 2]):
        (tmp_path / "b.arrow").write_bytes(raw)
        with pytest.raises(ValueError, match=r"b\.arrow is damaged, no \.arrow file, or of a newer version of Arrow"):
            documents(tmp_path / "b.arrow")
