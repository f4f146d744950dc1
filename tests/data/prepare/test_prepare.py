"""`prepare` from text to shards: contents, formats, splits, reproducibility."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from folders import contents
from nightly import nightly

from matmix.data.formats.base import pack
from matmix.data.formats.mds import Mds
from matmix.data.formats.webdataset import WebDataset
from matmix.data.manifest import Manifest, unigram_entropy
from matmix.data.prepare.command import prepare
from matmix.data.prepare.report import Report
from matmix.data.prepare.text import PrepareConfig
from matmix.data.splits.writer import SplitWriter
from matmix.data.tokenizer import Tokenizer

WORDS = ["a\nin", "is\n", *(f"{a}{b}" for a in ("sweet", "night", "love") for b in ("ly", "ing", "er", ""))]


def corpus(count, seed=0, words=40):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, words))) for _ in range(count)]


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return str(path)


def options(tmp_path, **changes):
    chosen = {
        "inputs": (str(tmp_path / "in.jsonl"),),
        "out": str(tmp_path / "out"),
        "vocab_size": 320,
        "validation_fraction": 0.2,
        "shard_megabytes": 0.005,
        "processes": 1,
    }
    if "tokenizer" in changes:
        del chosen["vocab_size"]
    return PrepareConfig(**{**chosen, **changes})


@pytest.fixture
def texts(tmp_path):
    made = corpus(400)
    write_jsonl(tmp_path / "in.jsonl", made)
    return made


def expected_split(texts, fraction=0.2):
    def is_validation(text):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < fraction * 2**64

    return {
        "train": [t for t in texts if not is_validation(t)],
        "validation": [t for t in texts if is_validation(t)],
    }


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_mds_is_read_by_streaming(tmp_path, texts, compression):
    from streaming import StreamingDataset

    manifest = prepare(options(tmp_path, compression=compression))
    tokenizer = Tokenizer.load(tmp_path / "out")
    for split, expected in expected_split(texts).items():
        folder = tmp_path / "out" / split
        dataset = StreamingDataset(
            local=str(folder), shuffle=False, batch_size=1, validate_hash="sha256", keep_zip=True
        )
        rows = [dataset[i]["tokens"] for i in range(len(dataset))]
        assert all(r.dtype == np.uint16 for r in rows)
        assert [tokenizer.decode(r) for r in rows] == expected
        lengths = np.load(folder / "lengths.npy", mmap_mode="r", allow_pickle=False)
        assert lengths.dtype == np.uint32
        assert lengths.tolist() == [len(r) for r in rows]
        check_split(manifest, split, tmp_path / "out", rows, expected)
    assert len(manifest.splits["train"].shards) > 2
    check_manifest(manifest, tmp_path, texts)


@pytest.mark.parametrize("compression", [nightly("zstd"), "none"])
def test_webdataset_is_read_by_webdataset(tmp_path, texts, compression):
    import webdataset

    manifest = prepare(options(tmp_path, format="webdataset", compression=compression))
    tokenizer = Tokenizer.load(tmp_path / "out")
    unzip = "import sys, zstandard; zstandard.ZstdDecompressor().copy_stream(sys.stdin.buffer, sys.stdout.buffer)"
    for split, expected in expected_split(texts).items():
        folder = tmp_path / "out" / split
        files = [str(folder / s.file) for s in manifest.splits[split].shards]
        if compression == "zstd":
            assert all(f.endswith(".tar.zst") for f in files)
            files = [f"pipe:{sys.executable} -c '{unzip}' < {f}" for f in files]
        dataset = webdataset.WebDataset(files, shardshuffle=False).decode()
        samples = list(dataset)
        rows = [s["npy"] for s in samples]
        assert all(r.dtype == np.uint16 and r.ndim == 1 for r in rows)
        assert [tokenizer.decode(r) for r in rows] == expected
        assert [int(s["__key__"]) for s in samples] == list(range(len(rows)))
        check_split(manifest, split, tmp_path / "out", rows, expected)
        index = json.loads((folder / "index.json").read_text())
        assert [s["file"] for s in index["shards"]] == [s.file for s in manifest.splits[split].shards]
    assert len(manifest.splits["train"].shards) > 2


def check_split(manifest, split, out, rows, expected):
    info = manifest.splits[split]
    assert (info.documents, info.tokens) == (len(rows), sum(map(len, rows)))
    assert info.bytes == sum(len(t.encode()) for t in expected)
    assert sum(s.documents for s in info.shards) == info.documents
    assert sum(s.tokens for s in info.shards) == info.tokens
    for shard in info.shards:
        raw = (out / split / shard.file).read_bytes()
        assert shard.sha256 == hashlib.sha256(raw).hexdigest()
        assert shard.bytes == len(raw)
    if split == "train":
        histogram = np.load(out / manifest.token_histogram, allow_pickle=False)
        assert histogram.dtype == np.int64
        counts = np.bincount(np.concatenate(rows), minlength=manifest.tokenizer.vocab_size)
        np.testing.assert_array_equal(histogram, counts)
        assert manifest.unigram_entropy == unigram_entropy(counts)


def check_manifest(manifest, tmp_path, texts):
    assert manifest == Manifest.load(tmp_path / "out")
    info = manifest.tokenizer
    raw = (tmp_path / "out" / info.file).read_bytes()
    assert info.sha256 == hashlib.sha256(raw).hexdigest()
    assert info.vocab_size == 320
    assert info.special["mask"] == 6
    (source,) = manifest.sources
    assert source["path"] == str(tmp_path / "in.jsonl")
    assert source["documents"] == len(texts)
    assert manifest.malformed["count"] == 0
    assert not (tmp_path / "out" / ".prepare").exists()


def test_unigram_entropy():
    assert unigram_entropy(np.array([0, 4, 4, 4, 4])) == pytest.approx(np.log(4))
    assert unigram_entropy(np.array([0, 5])) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("dtype", "compression"), [("uint16", "zstd"), ("uint32", None)])
def test_mds_shards_are_those_of_streaming(tmp_path, dtype, compression):
    """Byte for byte for raw shards; zstd may choose other bytes, so packed ones are compared unpacked."""
    from streaming import MDSWriter

    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 60000, n).astype(dtype) for n in [1, 255, 256, 70_000, *rng.integers(1, 900, 200)]]
    theirs = tmp_path / "theirs"
    with MDSWriter(
        columns={"tokens": f"ndarray:{dtype}"},
        out=str(theirs),
        compression=compression,
        hashes=["sha256"],
        size_limit=20_000,
    ) as writer:
        for row in rows:
            writer.write({"tokens": row})
    layout = Mds(dtype=dtype, compression=compression, size_limit=20_000)
    ours = SplitWriter(layout, tmp_path / "ours", tmp_path / "scratch")
    for row in rows:
        ours.write(row, 1)
    ours.finish()
    unpack = zstandard.ZstdDecompressor().decompress if compression else bytes
    a, b = contents(theirs), contents(tmp_path / "ours")
    assert a.keys() | {"lengths.npy"} == b.keys()
    assert len(a) > 5
    for name in a.keys() - {"index.json"}:
        assert unpack(a[name]) == unpack(b[name])
    index = [json.loads(side["index.json"]) for side in (a, b)]
    for side in index:
        for shard in side["shards"]:
            shard.pop("zip_data")
    assert index[0] == index[1]


@pytest.mark.parametrize("dtype", ["uint16", "uint8"])
def test_webdataset_shards_depend_on_the_documents_only(dtype):
    """Preparations that are stopped, made in parts or made again by a newer library end in the same files."""
    pictures = [pack(start + bytes(600), label) for label, start in enumerate([b"\xff\xd8\xff", b"BM"])]
    documents = pictures if dtype == "uint8" else [np.arange(n, dtype=dtype) for n in (1, 300, 7)]
    layout = WebDataset(dtype=dtype, compression=None, size_limit=1 << 20, prefix="2-")
    data = layout.encode(documents, 41)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
    names = ["41.jpg", "41.cls", "42.bmp", "42.cls"] if dtype == "uint8" else ["41.npy", "42.npy", "43.npy"]
    assert [member.name for member in members] == [
        f"2-{int(n):010}.{kind}" for n, kind in (x.split(".") for x in names)
    ]
    facts = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.type) for m in members}
    assert facts == {(0, 0, 0, "", "", 0o644, tarfile.REGTYPE)}
    assert members[0].offset_data == 512  # no extended header, whose form depends on the library


def test_webdataset_size_limit(tmp_path):
    layout = WebDataset(dtype="uint16", compression=None, size_limit=30_000)
    writer = SplitWriter(layout, tmp_path / "a", tmp_path / "b")
    for n in range(1, 400, 3):
        writer.write(np.arange(n, dtype=np.uint16), 1)
    writer.finish()
    sizes = [s.raw_bytes for s in writer.shards[:-1]]
    # tar pads to records of 10,240 bytes.
    assert max(sizes) <= 30_720
    assert min(sizes) > 20_000


def test_result_does_not_depend_on_processes(tmp_path, texts, monkeypatch):
    from matmix.data.prepare.text import sources

    monkeypatch.setattr(sources, "CHUNK_BYTES", 4000)
    prepare(options(tmp_path, out=str(tmp_path / "one")))
    prepare(options(tmp_path, out=str(tmp_path / "three"), processes=3))
    one, three = contents(tmp_path / "one"), contents(tmp_path / "three")
    assert one == three


def test_all_formats_together(tmp_path):
    parts = [corpus(30, seed=i) for i in range(5)]
    folder = tmp_path / "in"
    write_jsonl(folder / "1.jsonl", parts[0])
    (folder / "2.txt").write_text("\n--\n".join(parts[1]))
    pq.write_table(pa.table({"text": parts[2]}), folder / "3.parquet")
    raw = "".join(json.dumps({"text": t}) + "\n" for t in parts[3]).encode()
    (folder / "4.jsonl.zst").write_bytes(zstandard.compress(raw))
    (folder / "notes.md").write_text("not read")
    write_jsonl(tmp_path / "5.jsonl", parts[4])
    manifest = prepare(
        options(
            tmp_path,
            inputs=(str(folder), str(tmp_path / "*.jsonl")),
            text_documents="separator",
            document_separator="--",
        )
    )
    assert [s["documents"] for s in manifest.sources] == [30] * 5
    texts = [t.strip("\n") if i == 1 else t for i, part in enumerate(parts) for t in part]
    assert manifest.splits["train"].documents == len(expected_split(texts)["train"])


def test_existing_tokenizers(tmp_path, texts, capfd):
    prepare(options(tmp_path, out=str(tmp_path / "first")))
    model = tmp_path / "first" / "tokenizer" / "tokenizer.model"
    manifest = prepare(options(tmp_path, out=str(tmp_path / "second"), tokenizer=str(tmp_path / "first")))
    assert contents(tmp_path / "second")["tokenizer/tokenizer.model"] == model.read_bytes()
    shards = {k: v for k, v in contents(tmp_path / "second").items() if "shard" in k}
    assert shards == {k: v for k, v in contents(tmp_path / "first").items() if "shard" in k}

    import tokenizers

    vocabulary = {"[UNK]": 0, **{w: i for i, w in enumerate(sorted({w.strip() for w in WORDS}), start=1)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    manifest = prepare(options(tmp_path, out=str(tmp_path / "third"), tokenizer=str(tmp_path / "tokenizer.json")))
    assert (manifest.tokenizer.kind, manifest.tokenizer.file) == ("tokenizers", "tokenizer/tokenizer.json")
    words = sum(len(t.split()) for t in expected_split(texts)["train"])
    assert manifest.splits["train"].tokens == words


def test_large_vocabulary_takes_32_bits(tmp_path, texts):
    import tokenizers

    vocabulary = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 70_000)}, "sweet": 70_000}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    manifest = prepare(options(tmp_path, tokenizer=str(tmp_path / "tokenizer.json")))
    assert manifest.dtype == "uint32"
    histogram = np.load(tmp_path / "out" / manifest.token_histogram, allow_pickle=False)
    sweet = sum(t.split().count("sweet") for t in expected_split(texts)["train"])
    assert histogram[70_000] == sweet


def test_equal_documents_stay_together(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", corpus(100) * 3)
    prepare(options(tmp_path))
    tokenizer = Tokenizer.load(tmp_path / "out")
    from streaming import StreamingDataset

    seen = {}
    for split in ("train", "validation"):
        dataset = StreamingDataset(local=str(tmp_path / "out" / split), batch_size=1, keep_zip=True)
        seen[split] = {tokenizer.decode(dataset[i]["tokens"]) for i in range(len(dataset))}
    assert not seen["train"] & seen["validation"]
    assert len(seen["train"]) + len(seen["validation"]) == len(set(corpus(100)))


def test_without_validation_split(tmp_path, texts):
    manifest = prepare(options(tmp_path, validation_fraction=0.0))
    assert list(manifest.splits) == ["train"]
    assert manifest.splits["train"].documents == len(texts)
    assert not (tmp_path / "out" / "validation").exists()


def test_tokenizer_sample_is_bounded(tmp_path, told):
    write_jsonl(tmp_path / "in" / "1.jsonl", corpus(300))
    write_jsonl(tmp_path / "in" / "2.jsonl", ["zzzz " * 2000])
    prepare(options(tmp_path, inputs=(str(tmp_path / "in"),), sample_megabytes=0.02, vocab_size=300))
    assert "on 0.0 MB of text from 2 files" in told[0]
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert any("zz" in tokenizer.piece(i) for i in range(300))


def test_cli_of_the_options_and_plain_progress(tmp_path, texts):
    """The options make a command line, and progress without a terminal is plain lines."""
    program = (
        "import logging, tyro, matmix.data.prepare.report as r;"
        "from matmix.data.prepare import command as p, text as t;"
        "logging.basicConfig(level='INFO');"
        "r._SECONDS_BETWEEN_LINES = 0; p.prepare(tyro.cli(t.PrepareConfig))"
    )
    call = [
        sys.executable,
        "-c",
        program,
        "--inputs",
        str(tmp_path / "in.jsonl"),
        "--out",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(
        [*call, "--vocab-size", "320", "--validation-fraction", "0.2", "--processes", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert "tokenising: 100 %" in done.stderr
    assert "\r" not in done.stderr
    assert "next: matmix train" in done.stdout
    shown = subprocess.run([*call[:3], "--help"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "--max-malformed" in shown.stdout


def test_progress_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Report("tokenising", 1000) as report:
        report.update(1, 10)
        time.sleep(0.15)
        report.update(500, 1234)
    assert "tokenising:" in terminal.getvalue()
    assert "50%" in terminal.getvalue()
    assert "1,234 tokens" in terminal.getvalue()


def test_bundled_corpora(tmp_path):
    from matmix.data.corpora import bundled_names, bundled_path

    assert bundled_names() == ["moby_dick", "shakespeare"]
    assert sum(bundled_path(n).stat().st_size for n in bundled_names()) < 5e6
    assert (bundled_path("moby_dick").parent / "README.md").exists()
    manifest = prepare(
        options(
            tmp_path,
            inputs=("bundled:moby_dick",),
            vocab_size=400,
            sample_megabytes=0.1,
            max_document_chars=2000,
            validation_fraction=0.05,
        )
    )
    assert manifest.splits["train"].documents > 500
    assert 10 < manifest.splits["validation"].documents < 80
    assert manifest.sources[0]["path"] == "bundled:moby_dick"


def test_workers_do_not_pay_for_torch():
    modules = "matmix.data.prepare.pool, matmix.data.prepare.text.preparation"
    program = f"import sys, {modules}; print({{'torch', 'streaming'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "set()"
