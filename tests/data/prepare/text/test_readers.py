"""Input files to documents: every format, every position, every kind of damage."""

import gzip
import json
import lzma
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from failures import each
from hypothesis import given
from hypothesis import strategies as st

from matmix.data.prepare.base import Malformed, read_chunks
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text import sources as bases
from matmix.data.prepare.text import texts as text_files
from matmix.data.prepare.text.documents import documents_of, split_text
from matmix.data.prepare.text.readers import find_sources

COMPRESS = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
DOCUMENTS = [f"document {i}\nwith é and 😀 " + "word " * i for i in range(60)]


def documents(inputs, start=None, **options):
    sources, _ = find_sources([str(i) for i in inputs], ReadOptions(**options))
    return [d for chunk in read_chunks(sources, start) for d in documents_of(chunk)]


def jsonl(texts, field="text"):
    return "".join(json.dumps({field: t, "id": i}) + "\n" for i, t in enumerate(texts)).encode()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(bases, "CHUNK_BYTES", 500)


@each("suffix, compression", [(".jsonl", ""), (".txt", ""), (".txt", ".gz"), (".jsonl", ".xz"), (".txt", ".zst")])
def test_text_formats(tmp_path, suffix, compression, small_chunks):
    path = tmp_path / f"a{suffix}{compression}"
    raw = jsonl(DOCUMENTS) if suffix == ".jsonl" else "\n".join(DOCUMENTS).encode()
    path.write_bytes(COMPRESS[compression](raw))
    expected = DOCUMENTS if suffix == ".jsonl" else ["\n".join(DOCUMENTS)]
    assert documents([path]) == expected


def test_parquet(tmp_path, small_chunks):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(60), "body": DOCUMENTS}), path, row_group_size=7)
    assert documents([path], text_field="body") == DOCUMENTS


TEXT_TYPES = [
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string(), ordered=True),
]


@each("kind", TEXT_TYPES)
def test_parquet_with_every_type_of_text(tmp_path, small_chunks, kind):
    path = tmp_path / "a.parquet"
    texts = [*DOCUMENTS, *DOCUMENTS[:7]]
    pq.write_table(pa.table({"text": pa.array([*texts, None]).cast(kind)}), path, row_group_size=16)
    *found, last = documents([path])
    assert found == texts
    assert last == ""


@each("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.txt", "a.parquet"])
def test_reading_goes_on_from_every_position(tmp_path, small_chunks, name):
    for part in ("1", "2"):
        path = tmp_path / f"{part}{name}"
        texts = [f"{part} {d}" for d in DOCUMENTS]
        if name.endswith("parquet"):
            pq.write_table(pa.table({"text": texts}), path, row_group_size=16)
        else:
            raw = jsonl(texts) if "jsonl" in name else "\ufeff".encode() + "\n\n".join(texts).encode()
            path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](raw))
    sources, _ = find_sources([str(tmp_path)], ReadOptions(max_document_chars=100))
    chunks = list(read_chunks(sources))
    assert len(chunks) > 4
    whole = [list(documents_of(c)) for c in chunks]
    for i, chunk in enumerate(chunks):
        rest = [d for c in read_chunks(sources, chunk.end) for d in documents_of(c)]
        assert rest == [d for later in whole[i + 1 :] for d in later]
        assert chunk.end.line > chunk.start.line or chunk.end.offset > chunk.start.offset


def test_frames_in_a_row(tmp_path):
    for suffix in (".gz", ".xz", ".zst"):
        raw = b"".join(COMPRESS[suffix](jsonl([d])) for d in DOCUMENTS)
        (tmp_path / f"a.jsonl{suffix}").write_bytes(raw)
        assert documents([tmp_path / f"a.jsonl{suffix}"]) == DOCUMENTS


@each(
    "mode, raw, expected",
    [
        ("file", b"a\r\nb\n\nc\n", ["a\nb\n\nc\n"]),
        ("line", b"a\nb\r\n\nc", ["a", "b", "", "c"]),
        ("paragraph", b"a\nb\n\n \n\nc\n\n", ["a\nb", "c"]),
        ("paragraph", b"\n\na\n\nb", ["", "a", "b"]),
        ("separator", b"a\n\nb\n==\nc\n==\n\n==\nd", ["a\n\nb", "c", "", "d"]),
        ("separator", b"a ==\n== \nb\n", ["a ==", "b"]),
        ("file", b"\xef\xbb\xbfa", ["a"]),
        ("file", b"", []),
    ],
)
def test_documents_of_txt(tmp_path, mode, raw, expected):
    (tmp_path / "a.txt").write_bytes(raw)
    assert documents([tmp_path / "a.txt"], text_documents=mode, document_separator="==") == expected


def test_malformed_records(tmp_path):
    lines = [
        '{"text": "good"}',
        "",
        "{broken",
        '["text"]',
        '{"body": "x", "id": 1}',
        '{"text": null}',
        r'{"text": "\ud800"}',
        '{"text": "  "}',
        '{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = documents([tmp_path / "a.jsonl"])
    assert [d for d in found if isinstance(d, str)] == ["good", "", "last"]
    bad = [d for d in found if isinstance(d, Malformed)]
    assert [b.line for b in bad] == [3, 4, 5, 6, 7]
    for b, reason in zip(bad, ["not JSON", "JSON object", "fields: body, id", "NoneType", "surrogate"], strict=True):
        assert reason in b.reason
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    assert documents([tmp_path / "a.parquet"]) == ["a", "", "b"]  # a null is no text


@each("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_not_utf8(tmp_path, name):
    good = '{"text": "é"}\n'.encode()
    raw = good * 50 + b'{"text": "\xe9"}\n'
    (tmp_path / name).write_bytes(COMPRESS[".gz" if name.endswith("gz") else ""](raw))
    for options in ({}, {"max_document_chars": 100}):
        with pytest.raises(ValueError, match=rf"{name} is not UTF-8: line 51, byte 11 of the line is 0xe9"):
            documents([tmp_path / name], **options)


@each("suffix", [".gz", ".xz", ".zst"])
def test_damaged_files(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    whole = COMPRESS[suffix](jsonl(DOCUMENTS))
    for raw in (whole[: len(whole) // 2], b"no such format at all", whole[:50] + b"\0" * 20 + whole[70:]):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"a\.jsonl\.\w+ is damaged"):
            documents([path])


def test_windows_as_large_as_the_compressors_make_them(tmp_path):
    raw = jsonl(DOCUMENTS)
    long = zstandard.ZstdCompressionParameters(window_log=31)
    stream = zstandard.ZstdCompressor(compression_params=long).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(stream.compress(raw) + stream.flush())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0}]
    small = bytearray(lzma.compress(raw, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=filters))
    # The size of the dictionary stands in the block's header: 36 is 1 GiB, with which to compress would take ten.
    at = small.index(b"\x21\x01", 12) + 2
    small[at] = 36
    end = 12 + 4 * (small[12] + 1) - 4
    small[end : end + 4] = zlib.crc32(small[12:end]).to_bytes(4, "little")
    (tmp_path / "b.jsonl.xz").write_bytes(small)
    for name in ("a.jsonl.zst", "b.jsonl.xz"):
        assert documents([tmp_path / name]) == DOCUMENTS


def test_byte_order_marks_within_a_file(tmp_path):
    """As `cat` leaves them."""
    (tmp_path / "a.jsonl").write_bytes(b"".join(b"\xef\xbb\xbf" + jsonl([d]) for d in DOCUMENTS))
    assert documents([tmp_path / "a.jsonl"]) == DOCUMENTS


def test_parquet_that_cannot_be_used(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"is damaged, or no \.parquet file"):
        documents([path])
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(ValueError, match="no column 'text'; its columns are id, body"):
        documents([path])
    with pytest.raises(ValueError, match=r"column 'id' .* is int64, not string"):
        documents([path], text_field="id")
    pq.write_table(pa.table({"text": pa.array([b"x"]).dictionary_encode()}), path)
    with pytest.raises(ValueError, match=r"column 'text' .* is dictionary<values=binary.*, not string"):
        documents([path])


def test_sources(tmp_path):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    names = [
        "b.txt",
        "a.jsonl",
        "deep/c.JSON.GZ",
        "deep/readme.md",
        ".hidden/x.txt",
        ".x.txt",
        "d.parquet.gz",
    ]
    for name in names:
        (folder / name).write_bytes(b"")
    found, ignored = find_sources([str(folder), str(folder / "*.txt"), "bundled:moby_dick"])
    assert [s.name for s in found[:3]] == [str(folder / n) for n in ("a.jsonl", "b.txt", "deep/c.JSON.GZ")]
    assert found[3].name == "bundled:moby_dick"
    assert ignored == [str(folder / "d.parquet.gz"), str(folder / "deep/readme.md")]
    assert [s.name for s in find_sources([f"{folder}/**/*.txt"])[0]] == [str(folder / "b.txt")]
    (tmp_path / "empty").mkdir()
    for item, error, message in [
        (folder / "absent.txt", FileNotFoundError, "data path .* does not exist"),
        (folder / "*.csv", FileNotFoundError, "no file matches"),
        (folder / "deep/*.md", ValueError, "holds no file that can be read"),
        (tmp_path / "empty", ValueError, "holds no file that can be read"),
        (folder / "deep/readme.md", ValueError, "suffix that cannot be read; give .txt"),
        ("bundled:milton", ValueError, "there are: moby_dick, shakespeare"),
    ]:
        with pytest.raises(error, match=message):
            find_sources([str(item)])


def test_a_whole_file_is_cut_as_it_streams_by(tmp_path, small_chunks):
    text = "\n\n".join("\n".join(f"line {i} of {j}" for i in range(j % 7 + 1)) for j in range(400))
    (tmp_path / "a.txt").write_text(text)
    assert len(text) > 10 * 4 * bases.CHUNK_BYTES / 4
    assert documents([tmp_path / "a.txt"], max_document_chars=120) == split_text(text, 120)


def test_text_file_too_large_for_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LARGEST_TEXT_DOCUMENT", 1000)
    (tmp_path / "a.txt").write_text("a line\n" * 200)
    with pytest.raises(ValueError, match=r"a\.txt has more than .* --max-document-chars"):
        documents([tmp_path / "a.txt"])


@given(text=st.text(st.sampled_from("ab \n"), max_size=300), limit=st.integers(16, 60))
def test_split_text(text, limit):
    pieces = split_text(text, limit)
    assert "".join(pieces) == text
    assert all(len(p) <= limit for p in pieces)
    assert all(p for p in pieces) or text == ""


def test_cuts_fall_between_paragraphs_lines_words():
    assert split_text("aaaa\n\nbbbb\n\ncccc\nd", 16) == ["aaaa\n\nbbbb\n\n", "cccc\nd"]
    crlf = "aaaa\r\nbb\r\n\r\ncccc\r\nd"
    assert split_text(crlf, 18) == ["aaaa\r\nbb\r\n\r\n", "cccc\r\nd"]
    assert split_text("aaaa aaaa\nbbbb bbbb", 16) == ["aaaa aaaa\n", "bbbb bbbb"]
    assert split_text("aaaa aaaa bbbb bbbb", 16) == ["aaaa aaaa bbbb ", "bbbb"]
    assert split_text("a" * 20, 16) == ["a" * 16, "a" * 4]
    assert split_text("a\n\n" + "b" * 30, 16)[0] == "a\n\n" + "b" * 13
