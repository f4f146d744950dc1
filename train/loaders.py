"""Makes the loaders of a run, and sets the parts of the model's config that depend on the data."""

import dataclasses
import math

from matmix.data.loading.loader import Loader
from matmix.data.loading.rows import WHOLE, Facts, Part
from matmix.data.synthetic import GENERATED
from matmix.model.config import ModelConfig
from matmix.train.arguments import find_part
from matmix.train.config import RunConfig


def make_loader(
    config: RunConfig,
    split: str,
    data_rank: int,
    data_size: int,
    tokenizer_sha256: str | None = None,
    *,
    part: Part = WHOLE,
) -> Loader:
    """Returns batches without end of the training split, or one pass over the validation split. data_rank, data_size:
    which of how many ranks with data of their own this is; tokenizer_sha256: that of the data, None = any. part: what
    this rank is given of each micro-batch."""
    if generated := config.data.synthetic.task:
        GENERATED[generated] = find_part(generated, GENERATED, "generated task")
    own = {"data_rank": data_rank, "data_size": data_size, "micro_batch_size": config.micro_batch(data_size)}
    own |= {"global_batch_size": config.global_batch_size, "seed": config.seed, "one_pass": split != "train"}
    own["part"] = part
    return config.task().make_loader(config.data, split=split, tokenizer_sha256=tokenizer_sha256, **own)


def with_data_facts(config: RunConfig, loader: Loader) -> RunConfig:
    """Fills in what the data decides: the vocabulary size, where the recipe leaves it at 0 and the model reads tokens,
    the steps of `epochs`, the number of outputs of a classifier, where that is 0, and the names of classes and the mean
    and spread of images, which exports and scores need long after the data. Raises ValueError (one line) where the
    model reads tokens and the data holds none, or the other way round."""
    facts, model = loader.facts, config.model
    if facts.inputs != model.model_class.inputs:
        raise ValueError(
            f"the data holds {facts.inputs}, but a {model.architecture} reads {model.model_class.inputs}; change one "
            "of the two"
        )
    config = with_steps(config, loader)
    if facts.outputs is not None and model.model_class.takes_head:
        model = with_outputs(model, facts)
    if facts.token_types and model.type_vocab_size < 2:
        raise ValueError(
            f"pairs of texts have two token types, but model.type_vocab_size = {model.type_vocab_size}; "
            "set it to 2, or data.examples.token_types = false"
        )
    if facts.vocab_size:
        model = with_vocabulary(model, facts.vocab_size)
    return dataclasses.replace(config, model=model, data=facts.fill(config.data))


def with_steps(config: RunConfig, loader: Loader) -> RunConfig:
    """Returns `config` with the steps of its `epochs`, if it has any. Raises ValueError (one line) for data that has no
    epochs, and for a `stop_step` beyond them."""
    if not config.epochs:
        return config
    if loader.samples_per_epoch is None:
        raise ValueError(
            "generated samples, and data that is not prepared, have no epochs: set steps in place of epochs"
        )
    steps = max(1, math.ceil(config.epochs * loader.samples_per_epoch / config.global_batch_size))
    if config.stop_step > steps:
        raise ValueError(
            f"stop_step = {config.stop_step} lies beyond step {steps}, with which epochs = {config.epochs:g} end"
        )
    return dataclasses.replace(config, steps=steps)


def with_vocabulary(model: ModelConfig, needed: int) -> ModelConfig:
    """Returns the config of a model for a tokenizer of so many pieces. Raises ValueError (one line) where its own
    vocabulary is smaller."""
    if model.vocab_size == 0:
        # Matrix units like multiples of 64; the rows on top are never a target.
        return dataclasses.replace(model, vocab_size=-(-needed // 64) * 64)
    if model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's {needed} pieces; "
            f"set it to at least {needed}, or to 0 to take it from the data"
        )
    return model


def with_outputs(model: ModelConfig, facts: Facts) -> ModelConfig:
    """Returns the config of a model for the classes or values of the data. Raises ValueError (one line) where its own
    number of outputs is another one."""
    if model.head.outputs == 0:
        return dataclasses.replace(model, head=dataclasses.replace(model.head, outputs=facts.outputs))
    if model.head.outputs != facts.outputs:
        raise ValueError(
            f"model.head.outputs = {model.head.outputs}, but {facts.outputs_words}; set it to {facts.outputs}, or "
            "leave it out"
        )
    return model
