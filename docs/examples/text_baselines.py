"""`python -P docs/examples/text_baselines.py DIR`: what simple models make of labelled texts, to stand beside
fine-tuned ones.

DIR holds train.jsonl and test.jsonl as `labelled_texts` writes them; `--train tenth.jsonl` learns from fewer. Texts
and pairs of texts: the most frequent label, and logistic regression on TF-IDF of words and pairs of words, of runs of
one to six letters where texts have no spaces. Tagged sentences: the most frequent tag, and that of each word.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from pathlib import Path
from typing import Any

import tyro
from sklearn.metrics import accuracy_score, f1_score

from matmix.data.artifacts import read_json_lines
from matmix.studies.terms import fitted_to_terms
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded

Example = dict[str, Any]


def predictions(
    train: list[Example], test: list[Example], *, capitals: bool = False
) -> dict[str, tuple[list[str], list[str]]]:
    """Name of a baseline -> the labels of the test examples, and what it predicts for them. capitals: words that differ
    in them are two."""
    if "words" in train[0]:
        return _tags(train, test)
    labels = [example["label"] for example in test]
    most = collections.Counter(example["label"] for example in train).most_common(1)[0][0]
    texts = [_text(example) for example in train]
    model = fitted_to_terms(texts, [example["label"] for example in train], capitals=capitals)
    found = model.predict([_text(example) for example in test]).tolist()
    return {"most frequent label": (labels, [most] * len(labels)), "TF-IDF, logistic regression": (labels, found)}


def _text(example: Example) -> str:
    return f"{example['text']} {example['pair']}" if "pair" in example else example["text"]


def _tags(train: list[Example], test: list[Example]) -> dict[str, tuple[list[str], list[str]]]:
    of_word: dict[str, collections.Counter] = {}
    every: collections.Counter = collections.Counter()
    for example in train:
        every.update(example["tags"])
        for word, tag in zip(example["words"], example["tags"], strict=True):
            of_word.setdefault(word, collections.Counter())[tag] += 1
    most = every.most_common(1)[0][0]
    best = {word: counts.most_common(1)[0][0] for word, counts in of_word.items()}
    tags = [tag for example in test for tag in example["tags"]]
    found = [best.get(word, most) for example in test for word in example["words"]]
    return {"most frequent tag": (tags, [most] * len(tags)), "most frequent tag of the word": (tags, found)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baselines:
    """What simple models make of labelled texts."""

    folder: tyro.conf.Positional[Path]
    """Holds the examples to learn from, and test.jsonl."""
    train: str = "train.jsonl"
    """The file of the folder to learn from."""
    capitals: bool = False
    """Tell apart words that differ in capitals."""

    def run(self) -> int:
        """Prints accuracies and F1; the exit code."""
        train, test = (list(read_json_lines(self.folder / name)) for name in (self.train, "test.jsonl"))
        if not train or not test:
            raise ValueError(f"{self.folder} needs {self.train} and test.jsonl with examples in them")
        for name, (labels, found) in predictions(train, test, capitals=self.capitals).items():
            f1 = f1_score(labels, found, average="macro", zero_division=0.0)
            print(f"{name:<30} accuracy {accuracy_score(labels, found):6.2%}   macro F1 {f1:6.2%}", flush=True)
        return 0


def main(arguments: list[str]) -> int:
    """Scores the baselines and returns the exit code."""
    prog = "python -P docs/examples/text_baselines.py"
    return guarded(lambda: parse_arguments(Baselines, arguments, prog=prog).run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
