"""`python -P docs/examples/pretraining_gain.py TEXTS TASK --out DIR --runs '{"pretrained" = "runs/news"}'`: what
pretraining buys with few and many labels, every learning rate tuned.

Each pretrained run, and the model of the first one from random weights, is fine-tuned on TEXTS/hundredth.jsonl,
tenth.jsonl and train.jsonl: first with each rate and a seed of its own, scored on TEXTS/validation.jsonl; then with the
best rate and other seeds, scored on TEXTS/test.jsonl. Beside them stand the most frequent label and logistic regression
on TF-IDF of words and pairs of words, or of one to six letters where texts have no words. The same command again goes
on where it was stopped.

    DIR/LABELS/NAME/RATE/seed-N   fine-tuned runs; test.json there holds the scores on the test file
    DIR/settings.json             what they were made with; with other settings nothing is done
    DIR/table.md                  accuracy in percent, mean and sample standard deviation over the seeds
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import tyro

from matmix.data.artifacts import parse_json, read_json_lines
from matmix.data.storage.files import write_atomic
from matmix.data.tokenizer import Tokenizer
from matmix.studies.terms import fitted_to_terms
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded
from matmix.use.finetuning import finetuning_config
from matmix.use.opening import open_model

SCRATCH = "from scratch"
EPOCHS = {"hundredth": 40.0, "tenth": 8.0, "train": 3.0}
MOST = 3
"""Rates that are tried at most beside those given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """What pretraining buys with few and many labels."""

    texts: tyro.conf.Positional[Path]
    """Holds the files of labels, validation.jsonl and test.jsonl, as labelled_texts writes them."""
    task: tyro.conf.Positional[str]
    """Recipe of the fine-tuning."""
    out: Path
    """Folder of the runs and of the table."""
    runs: dict[str, str]
    """Name -> pretrained run."""
    epochs: dict[str, float] = dataclasses.field(default_factory=dict)
    """File of labels -> epochs; left out: 40 of hundredth, 8 of tenth, 3 of train."""
    rates: tuple[float, ...] = (1e-3, 3e-3)
    """Learning rates; where the best is at an end, the grid goes on at the ratio of the first two."""
    tune_seed: int = 0
    """Seed with which the rates are tried."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds that the table counts."""
    only: tuple[str, ...] = ()
    """Fine-tune only these, names of runs, files of labels or "from scratch"; the table has all that is there."""
    report: bool = False
    """Only write the table of what is there."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further fields of the recipe, such as model.dropout."""

    def run(self) -> int:
        """Fine-tunes what is missing, writes and prints the table; the exit code."""
        if not self.epochs:
            return dataclasses.replace(self, epochs=EPOCHS).run()
        if len(self.rates) < 2 or sorted(set(self.rates)) != list(self.rates):
            raise ValueError(f"--rates are {self.rates}: give two or more, the lowest first")
        if self.tune_seed in self.seeds:
            raise ValueError(f"--tune-seed {self.tune_seed} is among the seeds that the table counts: give another")
        if unknown := [name for name in self.only if name not in {*self.runs, SCRATCH, *self.epochs}]:
            raise ValueError(f"--only {unknown[0]}: there are {', '.join([*self.runs, SCRATCH, *self.epochs])}")
        self._keep_settings()
        for labels in [] if self.report else self._named(self.epochs):
            for name in self._named((*self.runs, SCRATCH)):
                self._fine_tune(labels, name)
        table = self.table()
        write_atomic(self.out / "table.md", table)
        print(table, end="", flush=True)
        return 0

    def _keep_settings(self) -> None:
        """Writes OUT/settings.json: what the runs there were made with. Raises ValueError (one line) for others."""
        path = self.out / "settings.json"
        there = parse_json(path.read_bytes(), path) if path.exists() else {"runs": {}, "epochs": {}}
        own = {"texts": str(self.texts), "task": self.task, "settings": self.settings}
        own |= {name: there[name] | getattr(self, name) for name in ("runs", "epochs")}
        flat, old = ({**one, **one["runs"], **one["epochs"]} for one in (own, there))
        for name, value in old.items():
            if name not in ("runs", "epochs") and flat[name] != value:
                raise ValueError(f"{self.out} holds runs with {name} = {value}, not {flat[name]}: name another --out")
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(own, indent=2) + "\n")

    def _named(self, words: Iterable[str]) -> list[str]:
        """Those of some words that --only names; all where it names none of them."""
        words = list(words)
        return [word for word in words if word in self.only] or words

    def _fine_tune(self, labels: str, name: str) -> None:
        given = [_rounded(rate) for rate in self.rates]
        ratio = given[1] / given[0]
        rates = sorted({*given, *self._tried(labels, name)})
        while True:
            for rate in rates:
                self._train(labels, name, rate, self.tune_seed)
            best = self._best(labels, name)
            if best == rates[0] and len(rates) < len(given) + MOST:
                rates.insert(0, _rounded(rates[0] / ratio))
            elif best == rates[-1] and len(rates) < len(given) + MOST:
                rates.append(_rounded(rates[-1] * ratio))
            else:
                break
        for seed in self.seeds:
            run = self._train(labels, name, best, seed)
            if not (run / "test.json").exists():
                _matmix("evaluate", run, self.texts / "test.jsonl", "--out", run / "test.json")

    def _run(self, labels: str, name: str, rate: float, seed: int) -> Path:
        return self.out / labels / name / f"{rate:g}" / f"seed-{seed}"

    def _train(self, labels: str, name: str, rate: float, seed: int) -> Path:
        run = self._run(labels, name, rate, seed)
        if (run / "summary.json").exists():
            return run
        start = [self.runs[name]] if name in self.runs else [next(iter(self.runs.values())), "--from-scratch"]
        fields = {
            "run_dir": run,
            "seed": seed,
            "optimizer.lr": f"{rate:g}",
            "epochs": self.epochs[labels],
            "data.examples.train": self.texts / f"{labels}.jsonl",
            "data.examples.validation": self.texts / "validation.jsonl",
            "evaluation.every": 1_000_000,  # at the end alone
            **self.settings,
        }
        _matmix("finetune", start[0], self.task, *start[1:], *_options(fields))
        return run

    def _tried(self, labels: str, name: str) -> dict[float, float]:
        """Rate -> accuracy on the validation file, with the seed by which rates are chosen."""
        found = {
            float(path.parent.parent.name): parse_json(path.read_bytes(), path)["validation"]["accuracy"]
            for path in (self.out / labels / name).glob(f"*/seed-{self.tune_seed}/summary.json")
        }
        return dict(sorted(found.items()))

    def _best(self, labels: str, name: str) -> float:
        tried = self._tried(labels, name)
        return max(tried, key=tried.__getitem__)

    def table(self) -> str:
        """Accuracy in percent of what is there, and below it the rates that were tried."""
        lines = [f"| {self.texts.name} | {' | '.join(self.epochs)} |", "|---" * (1 + len(self.epochs)) + "|"]
        cells = {name: [self._cell(labels, name) for labels in self.epochs] for name in (*self.runs, SCRATCH)}
        simple = [self._simple(labels) for labels in self.epochs]
        cells |= {name: [f"{scores[name]:.1f}" for scores in simple] for name in simple[0]}
        lines += [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()] + [""]
        for name in (*self.runs, SCRATCH):
            for labels in self.epochs:
                if tried := self._tried(labels, name):
                    scores = ", ".join(f"{100 * score:.1f} at {rate:g}" for rate, score in tried.items())
                    lines.append(f"{name}, {labels}: on the validation file {scores}.")
        return "\n".join(lines) + "\n"

    def _cell(self, labels: str, name: str) -> str:
        if not self._tried(labels, name):
            return "-"
        best = self._best(labels, name)
        files = [self._run(labels, name, best, seed) / "test.json" for seed in self.seeds]
        scores = [100 * parse_json(path.read_bytes(), path)["accuracy"] for path in files if path.exists()]
        if not scores:
            return "-"
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        return f"{statistics.mean(scores):.1f}{spread}" + (f" (n={len(scores)})" if len(scores) < len(files) else "")

    def _simple(self, labels: str) -> dict[str, float]:
        """Accuracy of simple models in percent, kept in a file."""
        path = self.out / labels / "simple.json"
        if not path.exists():
            rows = {split: list(read_json_lines(self.texts / f"{split}.jsonl")) for split in (labels, "test")}
            most = collections.Counter(row["label"] for row in rows[labels]).most_common(1)[0][0]
            count = sum(row["label"] == most for row in rows["test"])
            scores = {
                "TF-IDF, the tokens that encoders read": _tf_idf(rows[labels], rows["test"], self._read),
                "TF-IDF, whole texts": _tf_idf(rows[labels], rows["test"], str),
                "most frequent label": 100 * count / len(rows["test"]),
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(scores))
        return parse_json(path.read_bytes(), path)

    def _read(self, text: str) -> str:
        """What an encoder reads of a text: as many tokens as there are in a row beside two special ones."""
        return self._tokenizer.decode(self._tokenizer.encode(text)[: self._length - 2])

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_model(next(iter(self.runs.values())), device="cpu").origin.tokenizer

    @functools.cached_property
    def _length(self) -> int:
        return finetuning_config(next(iter(self.runs.values())), self.task, _options(self.settings)).data.seqlen


def _options(fields: Mapping[str, object]) -> list[str]:
    """Returns fields of a recipe as options of a command."""
    return [word for key, value in fields.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _tf_idf(train: list[dict[str, str]], test: list[dict[str, str]], read: Callable[[str], str]) -> float:
    model = fitted_to_terms([read(row["text"]) for row in train], [row["label"] for row in train])
    return 100 * float(model.score([read(row["text"]) for row in test], [row["label"] for row in test]))


def _matmix(*words: object) -> None:
    """Runs a command of matmix. Raises ValueError (one line) where it fails or is stopped."""
    command = [sys.executable, "-P", "-m", "matmix.launch.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
        raise ValueError(f"matmix {words[0]} ended with exit code {done.returncode}: {lines[-1]}")


def main(arguments: list[str]) -> int:
    """Measures what the arguments name and returns the exit code."""
    prog = "python -P docs/examples/pretraining_gain.py"
    return guarded(lambda: parse_arguments(Gain, arguments, prog=prog).run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
