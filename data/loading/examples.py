"""Makes the loader of labelled examples, and says what is known about them."""

from __future__ import annotations

from functools import cached_property

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples
from matmix.data.examples.encoding import Encoder
from matmix.data.loading.example_rows import ExampleRows
from matmix.data.loading.loader import Loader
from matmix.data.loading.loader_parts import check_batch_sizes
from matmix.data.tokenizer import Tokenizer


class ExampleFacts:
    """Facts about labelled examples."""

    bytes_per_target = None
    token_histogram = None

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.examples.encoder.tokenizer


def open_examples(kind: type[Examples], data: DataConfig, split: str, tokenizer: Tokenizer | None = None) -> Examples:
    """The examples of a split, tokenised by `tokenizer` or that of the config.

    Raises FileNotFoundError or ValueError (one line) for files that cannot be used.
    """
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
    return kind(options, encoder, split)


def class_names(kind: type[Examples], data: DataConfig) -> tuple[str, ...]:
    """The classes in the order of the outputs: those that the config names, as that of a run does, otherwise those of
    the training examples. Raises as `open_examples`."""
    return data.examples.labels or open_examples(kind, data, "train").classes.names


def build_example_loader(
    kind: type[Examples],
    data: DataConfig,
    *,
    split: str = "train",
    global_batch_size: int,
    micro_batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    seed: int = 0,
    one_pass: bool = False,
    tokenizer_sha256: str | None = None,
) -> Loader:
    """As `build_loader`, for labelled examples of one kind; a sample is an example."""
    check_batch_sizes(global_batch_size, micro_batch_size, data_size)
    assert 0 <= data_rank < data_size
    examples = open_examples(kind, data, split)
    tokenizer = examples.encoder.tokenizer
    if tokenizer_sha256 not in (None, tokenizer.sha256):
        raise ValueError(f"{tokenizer.path} is not the tokenizer that the run was started with; put that one back")
    shuffle = data.shuffle and not one_pass
    rows = ExampleRows(
        examples,
        packing=data.packing,
        seqlen=data.seqlen,
        seed=seed,
        shuffle=shuffle,
        one_pass=one_pass,
        token_types=data.examples.token_types and "pair" in examples.rows.columns,
    )
    fingerprint = {
        **examples.facts,
        "kind": kind.__name__,
        "tokenizer": tokenizer.sha256,
        "split": split,
        **{name: getattr(data, name) for name in ("seqlen", "packing", "prefix", "suffix")},
        "shuffle": shuffle,
        "seed": seed,
    }
    return Loader(
        rows,
        ExampleFacts(examples),
        data,
        fingerprint=fingerprint,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_rank=data_rank,
        data_size=data_size,
    )
