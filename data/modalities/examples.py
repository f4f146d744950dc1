"""Labelled examples: files of texts with labels, in place of a prepared dataset, to fine-tune and to score on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from matmix.data.config import DataConfig
from matmix.data.loading.order import Recent
from matmix.data.loading.rows import Facts
from matmix.data.modalities.base import Modality, Opened, Reading

if TYPE_CHECKING:
    from matmix.data.examples.base import Examples
    from matmix.data.tokenizer import Tokenizer


class ExampleFacts(Facts):
    """Facts about labelled examples."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples
        self.tokenizer = examples.encoder.tokenizer
        self.vocab_size = self.tokenizer.vocab_size
        self.classes, self.outputs = examples.classes.names, examples.outputs
        self.token_types = examples.config.token_types and "pair" in examples.rows.columns
        shown = f"{', '.join(self.classes[:10])}{', ...' if len(self.classes) > 10 else ''}"
        predicted = f"classes ({shown})" if self.classes else "value(s)"
        self.outputs_words = f"the training examples have {self.outputs} {predicted}"

    def fill(self, data: DataConfig) -> DataConfig:
        if not self.classes:
            return data
        return dataclasses.replace(data, examples=dataclasses.replace(data.examples, labels=self.classes))


class LabelledExamples(Modality):
    """Each sample is an example. A task asks for a `kind` of `matmix.data.examples`, which says what an example is."""

    def given(self, data: DataConfig) -> bool:
        return bool(data.examples.train)

    def datasets(self, data: DataConfig, split: str = "train") -> dict[str, float]:
        return {}

    def named(self, data: DataConfig) -> str:
        return str(data.examples.train)

    def names(self, data: DataConfig) -> list[str]:
        return [f"{Path(data.examples.train).name} (labelled examples)"]

    def is_here(self, data: DataConfig) -> bool:
        train = data.examples.train
        return bool(train and data.examples.tokenizer) and Path(train).exists()

    def size(self, data: DataConfig) -> None:
        return None  # the files have to be read through

    def facts_here(self, data: DataConfig) -> Facts:
        return Facts()

    def facts(self, data: DataConfig, *, kind: type[Examples]) -> ExampleFacts:
        return ExampleFacts(open_examples(kind, data, "train"))

    def class_names(self, data: DataConfig, *, kind: type[Examples]) -> tuple[str, ...]:
        return data.examples.labels or self.facts(data, kind=kind).classes

    def open(self, data: DataConfig, reading: Reading, *, kind: type[Examples]) -> Opened:
        from matmix.data.examples.rows import ExampleRows

        examples = open_examples(kind, data, reading.split)
        facts, tokenizer = ExampleFacts(examples), examples.encoder.tokenizer
        if reading.tokenizer_sha256 not in (None, tokenizer.sha256):
            raise ValueError(f"{tokenizer.path} is not the tokenizer that the run was started with; put that one back")
        rows = ExampleRows(examples, data, reading, token_types=facts.token_types)
        fingerprint = {
            **examples.facts,
            "kind": kind.__name__,
            "tokenizer": tokenizer.sha256,
            "split": reading.split,
            **{name: getattr(data, name) for name in ("seqlen", "packing", "prefix", "suffix")},
            "shuffle": reading.shuffles(data),
            "seed": reading.seed,
        }
        return Opened(rows, facts, fingerprint)


def open_examples(kind: type[Examples], data: DataConfig, split: str, tokenizer: Tokenizer | None = None) -> Examples:
    """Returns the examples of a split, tokenised by `tokenizer` or that of the config. Raises FileNotFoundError or
    ValueError (one line) for files that cannot be used."""
    from matmix.data.examples.base import Encoder
    from matmix.data.tokenizer import Tokenizer

    options = data.examples
    if tokenizer is None:
        if not options.tokenizer:
            raise ValueError("no tokenizer given: set data.examples.tokenizer to a file or folder, as RUN/tokenizer")
        tokenizer = Tokenizer.load(options.tokenizer)
    special = tokenizer.special
    for name in (data.prefix, data.suffix):
        if name != "none" and special[name] is None:
            raise ValueError(f"the tokenizer {tokenizer.path} has no {name}; set data.prefix and data.suffix to others")
    encoder = Encoder(
        tokenizer=tokenizer,
        prefix=special.get(data.prefix),
        suffix=special.get(data.suffix),
        max_length=data.seqlen,
        truncate=data.packing != "rows" if options.truncate is None else options.truncate,
        pad_id=special["pad"] or 0,
    )
    paths = [Path(file) for file in (options.path(split), options.train)]
    changed = [path.stat().st_mtime_ns for path in paths if path.exists()]
    settings = repr((options, data.prefix, data.suffix, data.seqlen, data.packing))
    key = (kind, split, str(tokenizer.path), tokenizer.sha256, settings, *changed)
    return _OPENED.get(key, lambda: kind(options, encoder, split))


# Fine-tuning opens examples for their classes, for their number, and to train on them.
_OPENED = Recent(2)
