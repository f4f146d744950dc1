"""Makes the config of a run that fine-tunes a trained model: on labelled examples, or on other pictures."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import shell_line
from matmix.model import ARCHITECTURES
from matmix.model.config import ModelConfig, model_config_to_dict
from matmix.train.arguments import find_part
from matmix.train.config import RunConfig
from matmix.train.init import InitSource
from matmix.train.loaders import make_loader, with_data_facts, with_outputs
from matmix.train.recipe import config_from_dict, plain, resolved_config
from matmix.train.recipe_files import find_recipe, read_toml
from matmix.train.tasks import TASKS, Task
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.train.tasks.image_classification import ImageClassification
from matmix.use.opening import TrainedModel, open_model

logger = logging.getLogger(__name__)

_OF_RECIPES = ("head", "dropout", "embedding_dropout")
"""Fields of [model] that a recipe decides; the others are the source's."""
_OF_TASKS, _OF_IMAGES = "finetune", "finetune_images"
"""The bundled recipes that give the settings of a task which is named without a recipe."""
LEAST_STEPS = 300
"""Steps of a fine-tuning with few examples, which are read again and again."""
EPOCHS, EPOCHS_OF_IMAGES = 3.0, 30.0
"""Epochs of a fine-tuning with many examples: those of the BERT papers, and ours of pictures."""
_RATE, _RATE_OF_IMAGES, _WIDTH = 5e-5, 1e-4, 768
"""Peak learning rates of base models, and their width."""
_HIGHEST = 2e-3


def finetuning_config(
    source: str, task: str, overrides: list[str], *, step: int = 0, from_scratch: bool = False
) -> RunConfig:
    """Returns the config of a run that fine-tunes `source` on a task.

    source: a run (step: its checkpoint, 0 = the newest), an export or a published checkpoint; task: a recipe, or the
    name of a task; overrides: fields of a recipe as the command line has them, such as ["--epochs", "5"]; from_scratch:
    take only model, tokenizer and special tokens of the source, and draw all weights from the seed. Raises
    FileNotFoundError or ValueError (one line) for what cannot be used.
    """
    values, kind = read_task(task, overrides)
    start = open_model(source, step=step or None).origin
    on_images = issubclass(kind, ImageClassification)
    if on_images:
        _take_images(values, start, overrides)
    else:
        _take_texts(values, on_examples(kind, values, source, start.model), start.model, start.words)
        _take_tokenizer(values["data"], start)
    if from_scratch:
        values.pop("init", None)
    else:
        values["init"] = {**values.get("init", {}), "from": source, "step": step}
    name = source.rstrip("/").rpartition("/")[2]
    run_dir = values.pop("run_dir", "") or f"runs/{name}-{Path(task).stem}{'-from-scratch' if from_scratch else ''}"
    config = resolved_config(plain(values), task, overrides, run_dir)
    if config.model.head.outputs == 0:
        facts = config.modality.facts(config.data, **config.task().asks("train"))
        if facts.outputs is not None:  # as many as the data has classes or values
            config = dataclasses.replace(config, model=with_outputs(config.model, facts))
    typed = {word.partition("=")[0] for word in overrides}
    if any(name in values or f"--{name}" in typed for name in ("epochs", "steps")):
        return config
    return _with_fitted_epochs(config, EPOCHS_OF_IMAGES if on_images else EPOCHS)


def counted(config: RunConfig) -> RunConfig:
    """Returns `config` with the steps of its epochs, which the number of examples decides. Raises FileNotFoundError or
    ValueError (one line) for examples that cannot be used."""
    loader = make_loader(config, "train", 0, 1)
    try:
        return with_data_facts(config, loader)
    finally:
        loader.close()


def planned_config(task: str, model: ModelConfig, words: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the config of a run that fine-tunes a model which is yet to be trained, without its tokens and its number
    of outputs; words: what messages call the model. Raises FileNotFoundError or ValueError (one line)."""
    values, kind = read_task(task, overrides)
    _take_texts(values, on_examples(kind, values, words, model), model, words)
    return resolved_config(plain(values), task, overrides, values.get("run_dir", ""))


def read_task(task: str, overrides: Sequence[str]) -> tuple[dict[str, Any], type[Task]]:
    """Returns the values in the recipe of a task, and the task. Raises FileNotFoundError or ValueError (one line)."""
    usual = {"image_classification": _OF_IMAGES}.get(task, _OF_TASKS)
    tasks = [name for name, kind in TASKS.items() if issubclass(kind, ExampleTask | ImageClassification)]
    path = find_recipe(usual if task in TASKS else task, tasks)
    values = {"model": {}, "data": {}, "objective": {}, **read_toml(path)}
    objective = values["objective"]
    if task in TASKS:
        objective["name"] = task
    objective["name"] = _typed(overrides, "--objective.name") or objective.get("name", "")
    return values, find_part(objective["name"], TASKS, "objective.name", Task)


def on_examples(
    kind: type[Task], values: dict[str, Any], source: str, model: ModelConfig | None = None
) -> type[ExampleTask]:
    """Returns the task that the recipe `values` names. Raises ValueError (one line) where it is none on labelled
    examples, which says what fits the model to be fine-tuned, as far as `source` and `model` are known."""
    if issubclass(kind, ExampleTask):
        return kind
    name = values["objective"]["name"]
    if model is None or _fits(kind, model):
        raise ValueError(f'"{name}" is no task on labelled examples: {_going_on(source)} goes on training with it')
    needed = " or ".join(kind.architectures)
    raise ValueError(
        f'"{name}" trains architecture {needed}, and {source} has architecture {model.architecture}: '
        + _tasks_of(model, source)
    )


def _going_on(source: str) -> str:
    """Returns the command that trains a pretrained model on other data than labelled examples."""
    return shell_line("matmix", "train", "RECIPE", "--init.from", source)


def _fits(kind: type[Task], model: ModelConfig) -> bool:
    """Says whether a task trains models that see as much of a text as this one: all of it, or what came before. An
    architecture from outside fits, as nothing is known of it."""
    known = [ARCHITECTURES[name].causal for name in kind.architectures if name in ARCHITECTURES]
    return model.causal in known or len(known) < max(1, len(kind.architectures))


def _tasks_of(model: ModelConfig, source: str) -> str:
    """Lists the bundled tasks for a model, with the commands that take them."""
    fitting = {name: kind for name, kind in TASKS.items() if _fits(kind, model)}
    examples = ", ".join(name for name, kind in fitting.items() if issubclass(kind, ExampleTask))
    others = " or ".join(name for name, kind in fitting.items() if not issubclass(kind, ExampleTask))
    on_text = f"{_going_on(source)} goes on with {others}"
    return f"matmix finetune takes {examples}, and {on_text}" if examples else on_text


def judging_config(opened: TrainedModel, task: str) -> RunConfig:
    """Returns the config of a run that would have made this model by training on a task, without its examples. Any
    encoder can be an embedder, by the mean of its features unless the recipe says otherwise. Raises FileNotFoundError
    or ValueError (one line) for a model or a task that cannot be used, also together."""
    start = opened.origin
    values, kind = read_task(task, [])
    kind = on_examples(kind, values, opened.name, start.model)
    needed, name = kind.architectures[0], values["objective"]["name"]
    if start.model.architecture in kind.architectures:
        values["model"] = model_config_to_dict(start.model)
    elif start.model.causal or needed != "text_embedder":
        raise ValueError(
            f"{start.words} is a model of architecture {start.model.architecture}, and {name} is scored with a "
            f"{needed}; {shell_line('matmix', 'finetune', 'ENCODER', name)} makes one"
        )
    else:
        head = {"pooling": "mean", **values["model"].get("head", {})}
        values["model"] = _model(start.model, start.words, kind, {"head": head})
    _take_tokenizer(values["data"], start)
    _fit_lengths(values["data"], start.model)
    return config_from_dict(plain(values), task)


def _take_texts(values: dict[str, Any], kind: type[ExampleTask], model: ModelConfig, words: str) -> None:
    """Fits model, lengths and rate of a recipe to a pretrained model of texts."""
    values["model"] = _model(model, words, kind, values["model"])
    _fit_lengths(values["data"], model)
    values.setdefault("optimizer", {}).setdefault("lr", fitted_rate(model.d_model))


def _model(model: ModelConfig, words: str, kind: type[ExampleTask], own: dict[str, Any]) -> dict[str, Any]:
    """Returns the table [model]: the source's with another output, and with the recipe's head and dropout."""
    if model.causal:
        raise ValueError(
            f"{words} is a {model.architecture}, which sees no later tokens: give an encoder; "
            + _tasks_of(model, "SOURCE")
        )
    values, head, own = _tables(model, own, _OF_RECIPES)
    if not model.model_class.takes_head:
        # Of the whole text the first position of an encoder holds nothing that training on masked tokens put there.
        head["pooling"] = "mean"
    return {**values, **own, "architecture": kind.architectures[0], "head": {**head, **own.get("head", {})}}


def _tables(model: ModelConfig, own: dict[str, Any], fields: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Returns the source's [model] and its head, without the number of outputs, and those `fields` of a recipe's."""
    values = model_config_to_dict(model)
    head = {name: value for name, value in values.pop("head", {}).items() if name != "outputs"}
    return values, head, {name: value for name, value in own.items() if name in fields}


def _take_tokenizer(data: dict[str, Any], start: InitSource) -> None:
    """Sets tokenizer and special tokens to the source's, unless a recipe sets them."""
    if start.tokenizer is None and "tokenizer" not in data.get("examples", {}):
        raise ValueError(f"{start.words} has no tokenizer: set data.examples.tokenizer")
    examples = data.setdefault("examples", {})
    if start.tokenizer is not None:
        examples.setdefault("tokenizer", str(start.tokenizer.path))
    examples.setdefault("token_types", start.model.type_vocab_size >= 2)
    data.setdefault("prefix", start.prefix)
    data.setdefault("suffix", start.suffix)


def _take_images(values: dict[str, Any], start: InitSource, overrides: Sequence[str]) -> None:
    """Makes [model] the source's as a classifier of images, with the recipe's dropout, and fits the rate. The images
    that it sees are as the source's, unless a recipe or the command line gives others."""
    if start.model.model_class.inputs != "images":
        raise ValueError(f"{start.words} is a {start.model.architecture}, which sees no images: give a model that does")
    table, head, own = _tables(start.model, values["model"], (*_OF_RECIPES, "drop_path"))
    # What the source has of a head is kept, so that its layers but for the last one can be taken.
    head = {**own.get("head", {}), **head}
    values["model"] = {**table, **own, "architecture": "image_classifier", "head": head}
    images, seen = values["data"].setdefault("images", {}), values["model"].setdefault("image", {})
    typed = _typed(overrides, "--data.images.size") or _typed(overrides, "--model.image.size")
    size = typed if typed and typed.isdecimal() else images.get("size", start.model.image.size)
    images["size"] = seen["size"] = int(size)
    images.setdefault("channels", start.model.image.channels)
    if start.images is not None:
        for name in ("mean", "std"):
            images.setdefault(name, list(getattr(start.images, name)))
    values.setdefault("optimizer", {}).setdefault("lr", fitted_rate(start.model.d_model, on_images=True))


def _fit_lengths(data: dict[str, Any], model: ModelConfig) -> None:
    """Sets the lengths that the model can have."""
    longest = model.max_seqlen
    if model.fixed_length_mixers():
        data["packing"], data["seqlen"] = "rows", longest
    elif model.position_embeddings:
        data["seqlen"] = min(data.get("seqlen", longest), longest)


def fitted_rate(width: int, *, on_images: bool = False) -> float:
    """Returns the peak learning rate for a model of d_model = `width`: at the width of base models theirs, falling with
    the square of the width, and never above 2e-3."""
    rate = (_RATE_OF_IMAGES if on_images else _RATE) * (_WIDTH / width) ** 2
    return float(f"{min(rate, _HIGHEST):.2g}")


def _with_fitted_epochs(config: RunConfig, usual: float) -> RunConfig:
    """Returns `config` with as many epochs as give `LEAST_STEPS` steps, or with the usual number if that is more."""
    loader = make_loader(config, "train", 0, 1)
    loader.close()
    examples = loader.samples_per_epoch
    needed = math.ceil(10 * LEAST_STEPS * config.global_batch_size / examples) / 10
    if needed > usual:
        logger.info(
            f"{examples:,} examples are few: {needed:g} epochs in place of {usual:g}, so that there are {LEAST_STEPS} "
            "steps; --epochs or --steps say otherwise"
        )
    return dataclasses.replace(config, epochs=max(usual, needed))


def _typed(words: Sequence[str], key: str) -> str | None:
    """Returns the value that a command line gives to an option, or None."""
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == key:
            return value if equals else following
    return None
