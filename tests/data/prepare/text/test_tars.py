"""Text from WebDataset's tar files that others wrote."""

import gzip
import io
import itertools
import json
import tarfile

import pytest
from failures import each
from foreign import write_tar
from object_store import running_store

from matmix.data.prepare.base import Malformed, Position, find_cuts, read_chunks
from matmix.data.prepare.text import ReadOptions, sources
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources

TEXTS = [f"text {i} é 😀 " + "word " * (i % 9) for i in range(40)]


def documents(*inputs, start=None, stop=None, **options):
    found, _ = find_sources([str(i) for i in inputs], ReadOptions(**options))
    return [d for chunk in read_chunks(found, start, stop) for d in documents_of(chunk)]


def members(texts=TEXTS, folder="set"):
    """Samples as captions of pictures have them; pickles are among them, which nobody may open."""
    found = {"__meta__/0.txt": "no sample", f"{folder}/.hidden.txt": "no sample"}
    for i, text in enumerate(texts):
        key = f"{folder}/{i:04}"
        found[f"{key}.jpg"] = b"no picture" * 100
        found[f"{key}.txt"] = text
        found[f"{key}.cls"] = str(i % 10)
        found[f"{key}.json"] = json.dumps({"caption": text.upper(), "meta": {"by": f"author {i}"}})
        found[f"{key}.pth"] = b"cos\nsystem\n(S'exit 1'\ntR."
    return found


@pytest.fixture
def shards(tmp_path):
    """The paths of two tar files, with 25 and 15 samples, as a list in braces."""
    for number, texts in enumerate((TEXTS[:25], TEXTS[25:])):
        write_tar(tmp_path / f"a-{number:02}.tar", members(texts))
    return f"{tmp_path}/a-{{00..01}}.tar"


def test_members_and_their_fields(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    assert documents(shards) == TEXTS
    assert documents(tmp_path, text_field="txt") == TEXTS
    assert documents(shards, text_field="caption") == [text.upper() for text in TEXTS]
    joined = [f"author {i}: {text} ({i % 10})" for texts in (TEXTS[:25], TEXTS[25:]) for i, text in enumerate(texts)]
    assert documents(shards, template="{meta.by}: {text} ({cls})") == joined
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress((tmp_path / "a-00.tar").read_bytes()))
    assert documents(tmp_path / "b.tar.gz") == TEXTS[:25]


@each("form", ["{}", "file://{}", "pipe:cat {}"])
def test_where_they_lie(shards, monkeypatch, form):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    item = form.format(shards)
    assert documents(item) == TEXTS
    found, _ = find_sources([item])
    assert len({(source.place, source.digest()) for source in found}) == 2
    assert find_sources([found[1].place])[0] == [found[1]]  # what joining parts looks for
    for offset in (0, 1, 14):
        assert documents(item, start=Position(1, offset), stop=Position(1, 15)) == TEXTS[25 + offset :]
    chunks = list(read_chunks(found, Position(1, 3)))
    assert [(chunk.start.line, chunk.end.line) for chunk in chunks[:1]] == [(4, 4 + len(chunks[0].records))]
    for parts in (2, 5):
        cuts = find_cuts(found, parts)
        pieces = [documents(item, start=a, stop=b) for a, b in itertools.pairwise(cuts)]
        assert list(itertools.chain(*pieces)) == TEXTS
        assert all(pieces)


@pytest.mark.slow
def test_shards_in_an_object_store(tmp_path, shards, monkeypatch):
    with running_store(monkeypatch) as store:
        for path in tmp_path.glob("a-*.tar"):
            store.put(f"set/{path.name}", path.read_bytes())
        assert documents(f"{store.url}/set/a-{{00..01}}.tar") == TEXTS
        found, _ = find_sources([f"{store.url}/set/a-00.tar"])
        local, _ = find_sources([str(tmp_path / "a-00.tar")])
        assert (found[0].bytes, found[0].digest()) == (local[0].bytes, local[0].digest())
        with pytest.raises(FileNotFoundError, match=r"cannot read s3://.*/set/a-02\.tar: it does not exist"):
            documents(f"{store.url}/set/a-02.tar")


def test_samples_that_lack_something(tmp_path):
    path = write_tar(
        tmp_path / "a.tar",
        {
            "0.jpg": b"",
            "1.txt": "good",
            "2.json": "{",
            "3.json": '["text"]',
            "4.json": '{"text": null, "by": "x"}',
            "5.txt": b"\xff",
            "6.json": '{"by": "x"}',
        },
    )
    lacks = "has no member or field 'txt' (it has:"
    found = documents(path)
    assert found.pop(2).reason.startswith("sample 2: its member .json is not JSON (Expecting")
    assert found == [
        Malformed(1, f"sample 0 {lacks} jpg)"),
        "good",
        Malformed(4, "sample 3: its member .json is no object but list"),
        Malformed(5, "member 'text' is NoneType, not text"),
        Malformed(6, "member 'text' is not UTF-8 (byte 1)"),
        Malformed(7, f"sample 6 {lacks} json, by in .json)"),
    ]


def test_tar_files_that_cannot_be_used(tmp_path, shards):
    path = tmp_path / "b.tar"
    whole = (tmp_path / "a-00.tar").read_bytes()
    cut = whole.index(b"set/0003.jpg")
    for raw in (b"", b"nothing of the kind" * 99, whole[:2000], whole[:cut], whole[:cut] + b"x" * 600, whole + whole):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"b\.tar is damaged, or no tar file: "):
            documents(path)
    write_tar(path, {"1.txt": "", "1.TXT": ""})
    with pytest.raises(ValueError, match=r"b\.tar is damaged, or no tar file: 1\.TXT: duplicate file name"):
        documents(path)
    write_tar(path, {"1.txt": "x" * 5000, "1.jpg": "x" * 9000})
    with pytest.raises(ValueError, match=r"b\.tar, member 1\.txt, is longer than 0\.004 MiB"):
        documents(path, max_line_megabytes=0.004)
    # A member that says it is a terabyte of zeros is not read.
    sparse = tarfile.TarInfo("1.txt")
    sparse.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 40), "GNU.sparse.numblocks": "1"}
    sparse.size = 1
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(sparse, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match=r"b\.tar, member 1\.txt, is longer than 64 MiB"):
        documents(path)
    with pytest.raises(
        ValueError, match=r"^pipe:cat /absent/a\.tar 2> /dev/null cannot be read: the command ended with code 1$"
    ):
        documents("pipe:cat /absent/a.tar 2> /dev/null")
    with pytest.raises(ValueError, match=r"^pipe:cat .* cannot be read: the command ended with code 7$"):
        documents(f"pipe:cat {tmp_path}/a-00.tar; exit 7")
    with pytest.raises(FileNotFoundError, match=r"a-02\.tar does not exist"):
        documents(shards.replace("01", "02"))
    with pytest.raises(FileNotFoundError, match=r"cannot read file:///absent/a\.tar: it does not exist"):
        documents("file:///absent/a.tar")
    with pytest.raises(ValueError, match=r"s3://b/a\.jsonl is a URL, and of those prepare reads \.tar files only"):
        documents("s3://b/a.jsonl")
    with pytest.raises(ValueError, match="its lists in braces cannot be read"):
        documents("a-{00..01.tar")
