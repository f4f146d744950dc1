"""Cutting an input into parts: each record in exactly one of them, in order, whatever the format."""

import bz2
import gzip
import itertools
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from failures import each

from matmix.data.prepare.base import Position, find_cuts, read_chunks
from matmix.data.prepare.text import ReadOptions, texts
from matmix.data.prepare.text import sources as bases
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources

TEXTS = [f"document {i}" + " and words" * (i * 7 % 23) + f"\n\nsecond paragraph {i}\nlast line" for i in range(60)]
COMPRESS = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(bases, "CHUNK_BYTES", 500)
    monkeypatch.setattr(texts, "REMEMBERED_BYTES", 1)


def write(folder, name, texts):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
        return
    suffix = next(s for s in (".gz", ".xz", ".zst", "") if name.endswith(s))
    lines = [json.dumps({"text": t}) for t in texts] if ".jsonl" in name else texts
    joint = "\n<|endoftext|>\n" if ".txt" in name else "\n"
    path.write_bytes(COMPRESS[suffix](joint.join(lines).encode()))


def read(sources, start=None, stop=None):
    return [d for chunk in read_chunks(sources, start, stop) for d in documents_of(chunk)]


CASES = {
    "jsonl": (["a.jsonl", "b.jsonl"], {}),
    "lines": (["a.txt", "b.txt"], {"text_documents": "line"}),
    "paragraphs": (["a.txt", "b.txt"], {"text_documents": "paragraph"}),
    "separator": (["a.txt", "b.txt"], {"text_documents": "separator"}),
    "pieces": (["a.txt", "b.txt"], {"max_document_chars": 100}),
    "whole files": ([f"{i}.txt" for i in range(9)], {}),
    "parquet": (["a.parquet", "b.parquet"], {}),
    "gz": (["a.jsonl.gz", "b.jsonl.gz"], {}),
    "xz": (["a.txt.xz", "b.txt.xz"], {"text_documents": "paragraph"}),
    "zst": (["a.jsonl.zst"], {"max_document_chars": 80}),
    "many zst": ([f"{i}.jsonl.zst" for i in range(9)], {}),
    "all": (["a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt", "e.txt.xz", "f.jsonl"], {"max_document_chars": 120}),
}


@each("case", CASES)
def test_parts_hold_each_record_once_and_in_order(tmp_path, case):
    names, chosen = CASES[case]
    for number, name in enumerate(names):
        write(tmp_path, name, [f"{number}: {text}" for text in TEXTS])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    sources, _ = find_sources([str(tmp_path)], ReadOptions(**chosen))
    expected = read(sources)
    assert len(expected) >= 9
    for parts in (1, 2, 3, 7, 40):
        cuts = find_cuts(sources, parts)
        assert len(cuts) == parts + 1
        assert cuts[0] == Position()
        pieces = [read(sources, *ends) for ends in itertools.pairwise(cuts)]
        assert [d for piece in pieces for d in piece] == expected, parts
        if parts <= 3:
            assert max(map(len, pieces)) <= 1.6 * len(expected) / parts + 3, parts


def test_a_mark_at_the_beginning_and_odd_line_ends(tmp_path):
    lines = [b'{"text": "one"}\r\n', b"\n", b'{"text": "two"}\n', b'{"text": "' + b"long " * 50 + b'"}\n'] * 5
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines)[:-1])
    sources, _ = find_sources([str(tmp_path)])
    expected = read(sources)
    for parts in range(1, 30):
        cuts = find_cuts(sources, parts)
        pieces = [read(sources, *ends) for ends in itertools.pairwise(cuts)]
        assert [d for piece in pieces for d in piece] == expected


def test_small_compressed_files_are_not_read_to_be_cut(tmp_path, monkeypatch):
    for number in range(8):
        write(tmp_path, f"{number}.jsonl.gz", TEXTS)
    sources, _ = find_sources([str(tmp_path)])
    monkeypatch.setattr(texts, "record_offsets", lambda *_: pytest.fail("read through"))
    cuts = find_cuts(sources, 4)
    assert cuts == [Position(source=i) for i in (0, 2, 4, 6, 8)]


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bz2.compress(bytes(range(256)) * 50))[:-9])
    (tmp_path / "b.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged"):
        find_cuts(find_sources([str(tmp_path / "a.jsonl.gz")])[0], 3)
    with pytest.raises(ValueError, match=r"b\.parquet is damaged, or no \.parquet file"):
        find_cuts(find_sources([str(tmp_path / "b.parquet")])[0], 3)
