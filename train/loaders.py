"""Makes the loaders of a run, and sets the parts of the model's config that depend on the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from matmix.data.examples.base import Examples
from matmix.data.loading.examples import ExampleFacts
from matmix.data.loading.images import ImageFacts
from matmix.data.loading.loader import Loader
from matmix.data.synthetic import TASKS
from matmix.model.config import ModelConfig
from matmix.train.config import RunConfig
from matmix.train.plugins import find_part


def make_loader(
    config: RunConfig, split: str, data_rank: int, data_size: int, tokenizer_sha256: str | None = None
) -> Loader:
    """Batches without end of the training split, or one pass over the validation split.

    data_rank, data_size: which of how many ranks with data of their own this is. tokenizer_sha256: what the data must
    have been prepared with; None = any tokenizer.
    """
    if generated := config.data.synthetic.task:
        TASKS[generated] = find_part(generated, TASKS, "generated task")
    return config.task().make_loader(
        config.data,
        split=split,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch(data_size),
        data_rank=data_rank,
        data_size=data_size,
        seed=config.seed,
        one_pass=split != "train",
        tokenizer_sha256=tokenizer_sha256,
    )


def with_data_facts(config: RunConfig, loader: Loader) -> RunConfig:
    """Fills in what the data decides: the vocabulary size, where the recipe leaves it at 0 and the model reads tokens,
    the steps of `epochs`, the number of outputs of a classifier, where that is 0, and the names of classes and the mean
    and spread of images, which exports and scores need long after the data.

    Raises ValueError (one line) where the model reads tokens and the data holds none, or the other way round.
    """
    if config.model.model_class.tokens != (loader.tokenizer is not None):
        held = "no tokens" if loader.tokenizer is None else "tokens"
        verb = "reads" if loader.tokenizer is None else "does not read"
        raise ValueError(f"the data holds {held}, but a {config.model.architecture} {verb} them; change one of the two")
    config = with_steps(config, loader)
    if isinstance(loader.facts, ImageFacts):
        return _with_images(config, loader.facts)
    if loader.tokenizer is None:
        return config
    if isinstance(loader.facts, ExampleFacts):
        config = _with_examples(config, loader.facts.examples, loader.dataset.token_types)
        if names := loader.facts.examples.classes.names:
            examples = dataclasses.replace(config.data.examples, labels=names)
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, examples=examples))
    return dataclasses.replace(config, model=with_vocabulary(config.model, loader.vocab_size))


def with_steps(config: RunConfig, loader: Loader) -> RunConfig:
    """`config` with the steps of its `epochs`, if it has any. Raises ValueError (one line) for generated samples."""
    if not config.epochs:
        return config
    if config.data.synthetic.task:
        raise ValueError("generated samples have no epochs: set steps in place of epochs")
    steps = math.ceil(config.epochs * loader.samples_per_epoch / config.global_batch_size)
    return dataclasses.replace(config, steps=max(1, steps))


def with_vocabulary(model: ModelConfig, needed: int) -> ModelConfig:
    """The config of a model for a tokenizer of so many pieces. Raises ValueError (one line) where its own vocabulary is
    smaller."""
    if model.vocab_size == 0:
        # Matrix units like multiples of 64; the rows on top are never a target.
        return dataclasses.replace(model, vocab_size=-(-needed // 64) * 64)
    if model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's {needed} pieces; "
            f"set it to at least {needed}, or to 0 to take it from the data"
        )
    return model


def with_outputs(model: ModelConfig, needed: int, where: str) -> ModelConfig:
    """The config of a model for data of so many classes or values; where: the data and their number, for messages.
    Raises ValueError (one line) where its own number is another one."""
    if model.head.outputs == 0:
        return dataclasses.replace(model, head=dataclasses.replace(model.head, outputs=needed))
    if model.head.outputs != needed:
        raise ValueError(f"model.head.outputs = {model.head.outputs}, but {where}; set it to {needed}, or leave it out")
    return model


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"


def _with_images(config: RunConfig, facts: ImageFacts) -> RunConfig:
    """Raises ValueError (one line) where the model's outputs are not the classes of the data."""
    images, classes = config.data.images, tuple(facts.classes)
    if config.model.model_class.takes_head:
        where = f"{images.named} has {len(classes)} classes ({_listed(classes)})"
        config = dataclasses.replace(config, model=with_outputs(config.model, len(classes), where))
    if images.classes and images.classes != classes:
        raise ValueError(f"data.images.classes are not those of {images.named}; leave them out, or prepare it again")
    images = dataclasses.replace(images, classes=classes, mean=tuple(facts.mean), std=tuple(facts.std))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, images=images))


def _with_examples(config: RunConfig, examples: Examples, token_types: bool) -> RunConfig:
    """Raises ValueError (one line) where the model's outputs or inputs are not those of labelled examples."""
    model, outputs = config.model, examples.outputs
    if outputs is not None:
        names = examples.classes.names
        held = f"classes ({_listed(names)})" if names else "value(s)"
        model = with_outputs(model, outputs, f"the training examples have {outputs} {held}")
    if token_types and model.type_vocab_size < 2:
        raise ValueError(
            f"pairs of texts have two token types, but model.type_vocab_size = {model.type_vocab_size}; "
            "set it to 2, or data.examples.token_types = false"
        )
    return dataclasses.replace(config, model=model)
