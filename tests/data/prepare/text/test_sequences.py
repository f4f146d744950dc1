"""DNA from FASTA and FASTQ files, at the intervals of BED files, and the bytes of any file."""

import gzip
import itertools
import os

import numpy as np
import pyfaidx
import pytest
from failures import each

from matmix.data.manifest import Manifest
from matmix.data.prepare.base import find_cuts, read_chunks
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig, ReadOptions
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources
from matmix.data.splits.reader import open_dataset
from matmix.data.tokenizer import Tokenizer

RNG = np.random.default_rng(5)
LONG = {"chr2": 331, "chr1": 1000}
GENOME = {name: "".join(RNG.choice(list("ACGTacgtN"), length)) for name, length in LONG.items()}
GENOME |= {"MT": "a", "gap": "N" * 120}


def fasta(path, genome=GENOME, width=60, end="\n"):
    lines = []
    for name, letters in genome.items():
        lines += [f">{name} of a test", *(letters[i : i + width] for i in range(0, len(letters), width))]
    raw = (end.join(lines) + end).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def fastq(path, reads):
    raw = "".join(f"@read {n}\n{letters}\n+\n{'@' * len(letters)}\n" for n, letters in enumerate(reads)).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def documents(path, start=None, stop=None, **options):
    found, _ = find_sources([str(path)], ReadOptions(**options))
    return [d for chunk in read_chunks(found, start, stop) for d in documents_of(chunk)]


def in_parts(path, parts, **options):
    found, _ = find_sources([str(path)], ReadOptions(**options))
    return [documents(path, a, b, **options) for a, b in itertools.pairwise(find_cuts(found, parts))]


@each("name", ["a.fa", "a.fasta.gz", "windows.fna"])
def test_fasta_files_give_sequences_windows_and_intervals(tmp_path, name):
    path = fasta(tmp_path / name, end="\r\n" if name == "windows.fna" else "\n")
    assert documents(path) == [GENOME["chr2"], GENOME["chr1"], GENOME["MT"], ""]
    windows = [GENOME[n][i : i + 100] for n in GENOME for i in range(0, len(GENOME[n]), 100)]
    wanted = [window if set(window) != {"N"} else "" for window in windows]
    assert documents(path, max_document_chars=100) == wanted
    assert wanted[-2:] == ["", ""]
    bed = tmp_path / "a.bed"
    bed.write_text("# two of chr1\ntrack x\nchr1\t990\t1000\tname\t0\t-\nchr2 0 331\n\nchr1\t59\t180\n")
    chr1 = GENOME["chr1"]
    wanted = [GENOME["chr2"], chr1[990:], chr1[59:180]]
    assert documents(path, intervals=str(bed)) == wanted
    halves = [d for text in wanted for d in (text[i : i + 64] for i in range(0, len(text), 64))]
    assert documents(path, intervals=str(bed), max_document_chars=64) == halves
    parts = in_parts(path, 3, intervals=str(bed), max_document_chars=16)
    assert [*itertools.chain(*parts)] == documents(path, intervals=str(bed), max_document_chars=16)
    assert min(map(len, parts)) > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted({name, "a.bed"})  # no index is left behind


def test_an_index_beside_a_fasta_file_is_used_unless_it_is_older_or_another_files(tmp_path, monkeypatch):
    path = fasta(tmp_path / "a.fa")
    index = tmp_path / "a.fa.fai"
    pyfaidx.Faidx(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(pyfaidx.Faidx, "build_index", lambda self: pytest.fail("the index was made again"))
        assert documents(path)[1] == GENOME["chr1"]
    other = index.read_text().replace("\t331\t", "\t330\t")
    index.write_text(other)
    os.utime(path, (1, 1))  # the file counts as another version
    with pytest.raises(ValueError, match=r"a\.fa\.fai does not fit .*a\.fa: remove it"):
        documents(path)
    os.utime(index, (0, 0))
    os.utime(path, (2, 2))
    assert documents(path)[0] == GENOME["chr2"]


@each("name", ["a.fastq", "a.fq.gz"])
def test_fastq_files_give_reads_in_parts_too(tmp_path, name):
    reads = ["".join(RNG.choice(list("ACGTN"), length)) for length in RNG.integers(1, 150, 200)]
    path = fastq(tmp_path / name, reads)
    assert documents(path) == reads
    parts = in_parts(path, 4)
    assert [*itertools.chain(*parts)] == reads
    if name == "a.fastq":
        assert min(map(len, parts)) > 20


def test_prepared_dna_has_a_token_for_each_letter(tmp_path):
    path = fasta(tmp_path / "a.fa")
    (tmp_path / "a.bed").write_text("chr1\t0\t1000\nchr2\t31\t331\n")
    options = {"inputs": (str(path),), "tokenizer": "dna-cased", "max_document_chars": 50, "processes": 1}
    options |= {"intervals": str(tmp_path / "a.bed"), "validation_fraction": 0.2}
    prepare(PrepareConfig(out=str(tmp_path / "out"), **options), summary=False)
    manifest, tokenizer = Manifest.load(tmp_path / "out"), Tokenizer.load(tmp_path / "out")
    texts = set()
    for split in ("train", "validation"):
        shards = open_dataset(str(tmp_path / "out"), split)
        assert shards.info.documents > 0
        for shard in range(shards.n_shards):
            texts |= {tokenizer.decode(shards.read(shard, i)) for i in range(shards.info.shards[shard].documents)}
    assert sum(split.tokens for split in manifest.splits.values()) == 1300
    assert texts == set(documents(path, max_document_chars=50, intervals=str(tmp_path / "a.bed")))
    (tmp_path / "a.bed").write_text("chr1\t0\t1000\n")
    with pytest.raises(ValueError, match="intervals"):
        prepare(PrepareConfig(out=str(tmp_path / "out"), **options), summary=False)
    (tmp_path / "a.bed").write_text("chr1\t0\t1000\nchr1\t500\t1000\n")
    prepare(PrepareConfig(out=str(tmp_path / "one"), **options | {"validation_fraction": 0.0}), summary=False)
    assert Manifest.load(tmp_path / "one").splits["train"].tokens == 1500


def test_raw_bytes_of_any_file_are_tokens(tmp_path, capsys):
    raw = RNG.integers(0, 256, 5000, dtype=np.uint8).tobytes()
    (tmp_path / "a.bin").write_bytes(raw)
    path, options = tmp_path / "a.bin", {"raw_bytes": True, "max_document_chars": 64}
    pieces = [raw[i : i + 64] for i in range(0, 5000, 64)]
    assert documents(path, **options) == pieces
    assert [*itertools.chain(*in_parts(path, 3, **options))] == pieces
    options |= {"inputs": (str(path),), "processes": 1, "validation_fraction": 0.0}
    prepare(PrepareConfig(out=str(tmp_path / "out"), tokenizer="bytes", **options))
    assert "round trip" not in capsys.readouterr().out  # no text was turned back
    shards = open_dataset(str(tmp_path / "out"), "train")
    assert b"".join(bytes(shards.read(0, i).astype(np.uint8)) for i in range(len(pieces))) == raw
    with pytest.raises(ValueError, match="raw_bytes needs tokenizer=bytes"):
        PrepareConfig(out="out", **options)
    with pytest.raises(ValueError, match=r"5,000 bytes and would be one document; cut it"):
        documents(path, raw_bytes=True, max_line_megabytes=0.001)


BROKEN = {
    "protein": (">p\nACGT\nMKVL\n", "", r"a\.fa, sequence p: letter 8 is 'L', which is none of DNA or RNA"),
    "no name": (">\nACGT\n", "", "Bad sequence name"),
    "no fasta": ("ACGT\n", "", "Unexpected text before the first sequence"),
    "twice": (">a\nAC\n>a\nAC\n", "", "Duplicate key"),
    "ragged": (">a\nAC\nACGT\nAC\n", "", r"Line length of fasta.* line 3; lines of a sequence, all but"),
    "blank lines": (">a\nAC\nAC\n\n\n", "", r"a\.fa cannot be read: lines of .* none blank: write them anew"),
    "unknown": (">a\nACGT\n", "b\t0\t2\n", r"a\.bed, line 1: no FASTA file has a sequence 'b'; there are a"),
    "beyond": (">a\nACGT\n", "a\t0\t2\na\t2\t5\n", r"a\.bed, line 2: a 2-5 ends behind the 4 letters that .*a\.fa has"),
    "overlap": (">a\nACGT\n", "a\t2\t4\na\t0\t3\n", r"a\.bed, lines 1 and 2: intervals of a overlap, and letters"),
    "backwards": (">a\nACGT\n", "a\t3\t3\n", r"a\.bed, line 1: write chromosome, start and end"),
    "negative": (">a\nACGT\n", "\na\t-1\t3\n", r"a\.bed, line 2: write chromosome"),
    "words": (">a\nACGT\n", "a 0\n", r"a\.bed, line 1: write chromosome"),
}
BROKEN_GZ = {
    "protein": (">p\nACGT\nMKVL\n", "", r"a\.fa\.gz, line 3: letter 4 is 'L'"),
    "no name": (">\nACGT\n", "", "line 1: a sequence without a name"),
    "no fasta": ("ACGT\n", "", "is no FASTA file: line 1 stands before"),
    "twice": (">a\nAC\n>a\nAC\n", "", "has two sequences 'a'"),
    "unknown": BROKEN["unknown"],
    "beyond": (">a\nACGT\n", "a\t2\t5\n", r"a\.bed, line 1: a 2-5 ends behind the 4 letters that .*a\.fa\.gz has"),
}


@each("case", [("a.fa", *case) for case in BROKEN.values()] + [("a.fa.gz", *case) for case in BROKEN_GZ.values()])
def test_broken_dna_is_refused_in_one_line(tmp_path, case):
    name, text, bed, message = case
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    (tmp_path / "a.bed").write_text(bed)
    options = {"inputs": (str(tmp_path / name),), "intervals": str(tmp_path / "a.bed") if bed else ""}
    with pytest.raises(ValueError, match=message) as caught:
        prepare(PrepareConfig(out=str(tmp_path / "out"), tokenizer="dna", processes=1, **options), summary=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@each(
    "text, message",
    [
        ("@a\nACGT\n+\nFFF\n", "line 1, begins no read: four lines"),
        ("@a\nAC\n+\nFF\n@b\nAC\n", "line 5, begins no read"),
        ("@a\nAE\n+\nFF\n", "line 2: letter 2 is 'E'"),
        (">a\nAC\n", "line 1, begins no read"),
    ],
)
def test_broken_reads_are_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "a.fq").write_text(text)
    with pytest.raises(ValueError, match=message):
        documents(tmp_path / "a.fq")
