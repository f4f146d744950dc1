"""Generated samples, which are made while training. Sample n of a split is a function of its source, the length, the
seed and n: its draws come from a generator keyed by them (`matmix.data.rng`), training and validation from different
ones."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matmix.data.config import DataConfig
from matmix.data.loading.masking import MaskingConfig
from matmix.data.loading.rows import Facts
from matmix.data.modalities.base import Modality, Opened, Reading
from matmix.data.rng import GENERATED_TRAINING, GENERATED_VALIDATION, generator
from matmix.data.synthetic import GENERATED, GeneratedSamples, make_generated

if TYPE_CHECKING:
    from matmix.data.loading.batch import Batch
    from matmix.data.tokenizer import Tokenizer

_OPTIONS = "symbols", "items", "depth", "arguments"
_UNKNOWN, _PADDING, _MASK = "<unk>", "<pad>", "<mask>"


class SampleFacts(Facts):
    """Facts about generated samples. Of those that are no tokens there are none."""

    def __init__(self, source: GeneratedSamples, seqlen: int) -> None:
        self.source, self.seqlen = source, seqlen
        self.inputs = "tokens" if source.tokens else "values"
        if source.one_answer:
            self.classes = source.tokens[: len(source.answers)]
            self.outputs = len(self.classes)
            self.outputs_words = f"{source.name} has {self.outputs} answers"

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return puzzle_tokenizer(self.source) if self.source.tokens else None

    @property
    def vocab_size(self) -> int:
        return 0 if self.tokenizer is None else self.tokenizer.vocab_size

    @cached_property
    def token_histogram(self) -> np.ndarray | None:
        if self.tokenizer is None:
            return None
        counts = self.source.answer_counts(self.seqlen)
        return np.pad(counts, (0, self.vocab_size - len(counts)))

    @property
    def chance_accuracy(self) -> float | None:
        counts = self.token_histogram
        return None if counts is None else float(counts.max() / counts.sum())


class Samples(Modality):
    """Each sample is generated, with as many positions as data.seqlen says."""

    cuts_rows = True

    def given(self, data: DataConfig) -> bool:
        return bool(data.synthetic.task)

    def check(self, data: DataConfig, *, causal: bool) -> None:
        # A source from outside is found when a run begins: reading somebody else's configuration imports nothing.
        if ":" not in data.synthetic.task:
            _check_form(make_generated(data.synthetic), data, causal)

    def packing(self, data: DataConfig) -> str:
        return "rows"

    def stretched(self, data: DataConfig, multiple: int) -> DataConfig:
        # Multiples are those of the length of training. Reading processes would take longer to start than the samples
        # to make.
        synthetic = dataclasses.replace(data.synthetic, eval_lengths=())
        return dataclasses.replace(data, seqlen=multiple * data.seqlen, synthetic=synthetic, workers=0)

    def datasets(self, data: DataConfig, split: str = "train") -> dict[str, float]:
        return {}

    def named(self, data: DataConfig) -> str:
        return data.synthetic.task

    def names(self, data: DataConfig) -> list[str]:
        return [f"{data.synthetic.task} (generated)"]

    def facts_here(self, data: DataConfig) -> Facts:
        if data.synthetic.task not in GENERATED:
            return Facts()
        return SampleFacts(make_generated(data.synthetic), data.seqlen)

    def open(self, data: DataConfig, reading: Reading, *, masking: MaskingConfig | None = None) -> Opened:
        """Readies the source. masking: for models that read the whole sequence; None = for causal ones."""
        options, source, causal = data.synthetic, make_generated(data.synthetic), masking is None
        _check_form(source, data, causal)
        rows = SampleRows(source, data, reading, causal)
        fingerprint = {
            "task": options.task,
            **{name: getattr(options, name) for name in (*_OPTIONS, *source.more_options)},
            "split": reading.split,
            "seqlen": data.seqlen,
            "seed": reading.seed,
            "objective": "causal" if causal else "masked",
        }
        return Opened(rows, SampleFacts(source, data.seqlen), fingerprint)


class SampleRows:
    """`Rows` of generated samples; numbers at or above `limit` give rows of padding."""

    def __init__(self, source: GeneratedSamples, data: DataConfig, reading: Reading, causal: bool) -> None:
        self.source, self.seqlen, self.seed, self.causal = source, data.seqlen, reading.seed, causal
        self.part = reading.part
        self.stream = GENERATED_TRAINING if reading.split == "train" else GENERATED_VALIDATION
        self.limit = data.synthetic.validation_samples if reading.one_pass else None

    @property
    def samples_per_epoch(self) -> int | None:
        return self.limit

    def __getitems__(self, samples: list[int]) -> Batch:
        from matmix.data.loading.batch import part_batch, row_batch, selecting

        pieces = list(self.part.pieces(len(samples), self.seqlen))
        first, samples = pieces[0][1], samples[pieces[0][0] : pieces[-1][0] + 1]
        inputs, labels = self.source.padding(len(samples), self.seqlen)
        mask, n_tokens = None if self.causal else self.source.mask_id, 0
        for row, (sample, (_, start, stop)) in enumerate(zip(samples, pieces, strict=True)):
            if self.limit is None or sample < self.limit:
                self.source.fill(generator(self.seed, 0, self.stream, sample), inputs[row], labels[row], mask)
                n_tokens += self.source.count(inputs[row, start:stop])
        if self.part.parts == 1:
            return row_batch(inputs, labels, n_tokens=n_tokens, causal=self.causal)
        own = slice(first, first + sum(stop - start for _, start, stop in pieces))
        begins, counts = np.zeros(labels.shape[:2], dtype=bool), np.full(len(samples), self.seqlen)
        inputs, labels = (values.reshape(-1, *values.shape[2:])[own] for values in (inputs, labels))
        batch = part_batch(inputs, labels, begins, counts, "rows", first=first, n_tokens=n_tokens)
        return batch if self.causal else selecting(batch)


def puzzle_tokenizer(source: GeneratedSamples) -> Tokenizer:
    """Returns a tokenizer of words between spaces: the source's tokens by their ids, then <unk>, <pad> and <mask>."""
    import tokenizers

    from matmix.data.tokenizer import FastTokenizer

    vocabulary = {name: index for index, name in enumerate((*source.tokens, _UNKNOWN))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([_UNKNOWN, _PADDING, _MASK])
    return FastTokenizer(Path(f"the tokens of {source.name}"), backend.to_str(pretty=True).encode())


def _check_form(source: GeneratedSamples, data: DataConfig, causal: bool) -> None:
    source.check(data.seqlen)
    if not (source.causal_form if causal else source.bidirectional_form):
        raise ValueError(
            f'data.synthetic.task = "{data.synthetic.task}" has no form for models that '
            f"{'predict what comes next' if causal else 'read the whole sequence'}; change objective.name or the task"
        )
