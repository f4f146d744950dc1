"""Small files in the exact layout of the public GLUE download: names, columns, byte-order mark, quotation marks, and a
row of QQP that is broken as some are there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

WORDS = (
    *("the", "king", "queen", "sword", "night", "day", "love", "death", "speaks", "rises", "falls", "gives", "to"),
    *("from", "under", '"soft', 'cold"', "bright", "don't", '"', "noble", "his", "her", "is", "was", "not", "and"),
)
"""Some with quotation marks, which are characters like others here."""
ENTAILMENT = ("entailment", "neutral", "contradiction")


def sentence(draw: random.Random) -> str:
    """One to twelve words."""
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))


def _cola(draw: random.Random, number: int, split: str) -> list[str]:
    label = draw.choice("01")
    return ["gj04", label, "*" if label == "0" else "", sentence(draw)]


def _sst2(draw: random.Random, number: int, split: str) -> list[str]:
    return [f"{sentence(draw)} ", draw.choice("01")]


def _mrpc(draw: random.Random, number: int, split: str) -> list[str]:
    return [draw.choice("0111"), str(702876 + number), str(702977 + number), sentence(draw), sentence(draw)]


def _qqp(draw: random.Random, number: int, split: str) -> list[str]:
    return [str(number), str(2 * number), str(2 * number + 1), sentence(draw), sentence(draw), draw.choice("001")]


def _stsb(draw: random.Random, number: int, split: str) -> list[str]:
    score = f"{draw.randint(0, 500) / 100:.3f}"
    row = [str(number), "main-captions", "MSRvid", "2012test", f"{number:04}", "none", "none"]
    return [*row, sentence(draw), sentence(draw), score, *(["licence"] if number % 3 == 0 else [])]


def _mnli(draw: random.Random, number: int, split: str) -> list[str]:
    labels = [draw.choice(ENTAILMENT) for _ in range(1 if split == "train" else 5)]
    texts = sentence(draw), sentence(draw)
    parses = [*(f"( {text} )" for text in texts), *(f"(ROOT (S {text}))" for text in texts)]
    return [str(number), f"{number}", f"{number}e", "slate", *parses, *texts, *labels, labels[0]]


def _qnli(draw: random.Random, number: int, split: str) -> list[str]:
    return [str(number), sentence(draw), sentence(draw), draw.choice(("entailment", "not_entailment"))]


_MNLI = (
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse"),
    *("sentence2_parse", "sentence1", "sentence2", "label1"),
)
Row = Callable[[random.Random, int, str], list[str]]
LAYOUT: dict[str, tuple[tuple[str, ...], Row]] = {
    "CoLA": ((), _cola),
    "SST-2": (("sentence", "label"), _sst2),
    "MRPC": (("\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"), _mrpc),
    "QQP": (("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), _qqp),
    "STS-B": (
        (*("index", "genre", "filename", "year", "old_index", "source1", "source2"), "sentence1", "sentence2", "score"),
        _stsb,
    ),
    "MNLI": ((*_MNLI, "gold_label"), _mnli),
    "QNLI": (("index", "question", "sentence", "label"), _qnli),
    "RTE": (("index", "sentence1", "sentence2", "label"), _qnli),
}
"""Folder -> header and rows; CoLA has no header."""
BROKEN = ["133273", "213221", "213222", "how does a", "broken row"]
"""A row of QQP that ends too early."""


def write_glue(folder: Path, tasks=tuple(LAYOUT), *, train: int = 24, dev: int = 13) -> dict[str, list[list[str]]]:
    """Writes these tasks; returns the fields of the rows of each file, by "TASK/file", without the broken ones."""
    written = {}
    for task in tasks:
        header, row = LAYOUT[task]
        names = ["dev_matched", "dev_mismatched"] if task == "MNLI" else ["dev"]
        for name in ["train", *names]:
            draw = random.Random(f"{task} {name}")
            rows = [row(draw, number, name) for number in range(train if name == "train" else dev)]
            first = header
            if task == "MNLI" and name != "train":
                first = (*_MNLI, "label2", "label3", "label4", "label5", "gold_label")
            lines = [*([first] if first else []), *rows]
            if task == "QQP" and name == "train":
                lines.insert(5, BROKEN)
            path = folder / task / f"{name}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join("\t".join(fields) + "\n" for fields in lines), encoding="utf-8")
            written[f"{task}/{name}.tsv"] = rows
        (folder / task / "test.tsv").write_text("index\tsentence\n0\tnot read\n")
    return written
