"""Reads exports of this project back as models."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from matmix.model.backbone import Backbone
from matmix.model.build import build_model
from matmix.model.config import ModelConfig, model_config_from_dict
from matmix.model.images.config import ImageInputs
from matmix.model.interop.importing.foreign import indexed_files, read_object, read_safetensors

PROCESSOR = "preprocessor_config.json"
"""The file of an export that says how pictures are read."""
_LARGEST = 1 << 14
"""Pixels to which the short side of a picture is resized, at most, whatever an export asks for."""


def read_export(directory: str | Path) -> Backbone:
    """Returns the model of an export, with its weights, on the CPU; `eval()` it before use. The module of an
    architecture from outside must be imported first. Raises FileNotFoundError, ValueError (one line)."""
    directory = Path(directory)
    model = build_model(read_export_config(directory))
    files = (read_safetensors(file)[0].items() for file in weight_files(directory))
    weights = ((name.removeprefix("model."), tensor) for tensors in files for name, tensor in tensors)
    load_weights(model, weights, directory)
    return model


def read_export_config(directory: Path) -> ModelConfig:
    """The configuration of an exported model. Raises FileNotFoundError, ValueError (one line)."""
    path = directory / "config.json"
    values = read_object(path)
    if "matmix" not in values:
        raise ValueError(f"{directory} is not an export of matmix: its config.json is that of another model")
    try:
        return model_config_from_dict(values["matmix"], vocab_size=values["vocab_size"])
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a model ({ascii(error)[:300]})") from None


def read_length(directory: Path) -> int | None:
    """Tokens of a text that an export says to keep to; None where it does not. Raises ValueError (one line)."""
    path = directory / "config.json"
    length = read_object(path).get("max_position_embeddings")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"{path}: max_position_embeddings is a number of tokens, from 1 on")
    return length


def read_labels(directory: Path) -> tuple[str, ...]:
    """The names of a classifier's outputs; () where they are transformers' own, LABEL_0 .... Raises ValueError."""
    path = directory / "config.json"
    names = read_object(path).get("id2label", {}) if path.is_file() else {}
    labels = tuple(names.get(str(number), "") for number in range(len(names))) if isinstance(names, dict) else ("",)
    if not all(isinstance(label, str) and label for label in labels):
        raise ValueError(f"{path}: id2label does not name the outputs from 0 on")
    return () if labels == tuple(f"LABEL_{number}" for number in range(len(labels))) else labels


def weight_files(directory: Path) -> list[Path]:
    """Returns the files of an export that hold weights, by names that begin with "model."."""
    index = directory / "model.safetensors.index.json"
    files = indexed_files(index) if index.is_file() else [directory / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{directory} is not complete: it lacks {missing[0]}")
    return files


@torch.no_grad()
def load_weights(model: Backbone, tensors: Iterable[tuple[str, torch.Tensor]], where: Path | str) -> None:
    """Copy tensors into the model as they come. Raises ValueError if one is missing, unknown or misshapen."""
    own = model.state_dict()
    missing = set(own)
    for name, tensor in tensors:
        if name not in own:
            raise ValueError(f"{where} holds weights {name!r}, which its configuration does not have")
        if own[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, its configuration {tuple(own[name].shape)}"
            raise ValueError(f"{where} holds weights {name!r} of shape {shapes}")
        own[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"{where} lacks the weights {min(missing)!r}")


def read_image_inputs(directory: Path) -> ImageInputs | None:
    """How the image processor of an export reads pictures; None where it has none. Raises ValueError (one line)."""
    path = directory / PROCESSOR
    if not path.is_file():
        return None
    values = {"background": 255, **read_object(path)}  # exports were made without it
    try:
        known = {field.name: values[field.name] for field in dataclasses.fields(ImageInputs)}
        inputs = ImageInputs(**known | {name: tuple(map(float, known[name])) for name in ("mean", "std")})
        whole = type(inputs.size) is type(inputs.background) is int
        if not (whole and all(map(math.isfinite, (*inputs.mean, *inputs.std)))):
            raise ValueError("size is a number of pixels, background a whole number, mean and std are finite")
        if inputs.size > _LARGEST * inputs.crop:
            raise ValueError(f"size / crop is more than {_LARGEST} pixels")
        return inputs
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} does not say how to read pictures ({ascii(error)[:200]})") from None
