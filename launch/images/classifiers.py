"""Reads a run or an export as an image classifier that is ready for use, and pictures as it wants them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.images.config import ImagesConfig
from matmix.data.images.decode import UnreadablePicture, decode
from matmix.data.images.transforms import make_transform
from matmix.launch.export import image_inputs
from matmix.launch.loading import check_raw
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig
from matmix.model.images.config import ImageInputs
from matmix.model.interop.importing.exported import (
    PROCESSOR,
    load_weights,
    read_export,
    read_export_config,
    read_image_inputs,
    read_labels,
)
from matmix.train.checkpoint.steps import step_of
from matmix.train.engine.full_state import Weights
from matmix.train.run.directory import RunDirectory
from matmix.train.run.remote import fetch_run
from matmix.train.run.trained import Trained, find_trained
from matmix.train.tasks.image_classification import class_names


@dataclasses.dataclass(frozen=True, slots=True)
class ImageModel:
    """A model of images, in evaluation, from a run or an export."""

    source: str
    """What it is from, as the caller named it."""
    model: Backbone
    inputs: ImageInputs
    """How pictures are read."""
    data: DataConfig
    """The same as a recipe says it. An export names no dataset, and classes only where it has their names."""
    classes: tuple[str, ...]
    """Names of the outputs; those of an export without names are "class 0" and so on."""
    device: torch.device
    step: int | None = None
    """The step of a run's checkpoint, None for an export."""
    averaged: bool = False
    """Whether the weights are the average of a run's weights."""
    seed: int = 0
    """Of a run."""

    @property
    def state(self) -> str:
        """Which weights these are, for people."""
        step = "export" if self.step is None else f"step {self.step:,}"
        return f"{step}, averaged weights" if self.averaged else step


def load_image_model(
    source: str | Path, *, step: int | None = None, device: str | None = None, weights: Weights = "raw"
) -> ImageModel:
    """Reads a run (its newest checkpoint, or that of `step`; the weights or their average) or an export.

    Raises FileNotFoundError or ValueError (one line) where there is none, or no image classifier.
    """
    path, fetched = fetch_run(source, step=step, weights_only=weights == "raw")
    if not path.is_dir():
        raise FileNotFoundError(f"no run or export at {path}")
    if (path / "config.toml").is_file():
        _check_takes_images(RunDirectory(path).read_config().model, path)
        loaded = _of_run(str(source), find_trained(RunDirectory(path), step, whole=fetched, weights=weights))
    elif (path / "config.json").is_file():
        if step is not None:
            raise ValueError(f"{path} is an export, which has no steps to choose from; leave --step out")
        check_raw(weights, path)
        loaded = _of_export(str(source), path)
    else:
        raise ValueError(f"{path} is neither a run (no config.toml) nor an export (no config.json)")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return dataclasses.replace(loaded, model=loaded.model.to(place).eval(), device=place)


def _of_run(source: str, trained: Trained) -> ImageModel:
    config = trained.config
    if (inputs := image_inputs(config)) is None:
        raise ValueError(f"{source} was not trained on prepared pictures, and does not say how to read others")
    model = build_model(config.model)
    load_weights(model, trained.weights(), source)
    return ImageModel(
        source=source,
        model=model,
        inputs=inputs,
        data=config.data,
        classes=class_names(config.data),
        device=torch.device("cpu"),
        step=step_of(trained.checkpoint.name),
        averaged=trained.which == "ema",
        seed=config.seed,
    )


def _of_export(source: str, path: Path) -> ImageModel:
    config = read_export_config(path)
    _check_takes_images(config, path)
    names, outputs = read_labels(path), config.head.count
    if names and len(names) != outputs:
        raise ValueError(f"{path}/config.json names {len(names)} classes, but the model has {outputs} outputs")
    inputs = read_inputs(path)
    images = ImagesConfig(**dataclasses.asdict(inputs), channels=config.image.channels, classes=names)
    return ImageModel(
        source=source,
        model=read_export(path),
        inputs=inputs,
        data=DataConfig(images=images),
        classes=names or tuple(f"class {number}" for number in range(outputs)),
        device=torch.device("cpu"),
    )


def _check_takes_images(config: ModelConfig, path: Path) -> None:
    kind = config.model_class
    if kind.takes_images:
        return
    instead = "matmix evaluate scores its task on texts" if kind.takes_head else "matmix generate writes with it"
    raise ValueError(
        f"{path} holds a model of architecture {config.architecture!r}, which reads no pictures; {instead}"
    )


def read_inputs(export: Path) -> ImageInputs:
    """How the image processor of an export reads pictures. Raises ValueError (one line) where it does not say so."""
    if (inputs := read_image_inputs(export)) is None:
        raise ValueError(f"{export} has no {PROCESSOR}, which says how to read pictures; export the run again")
    return inputs


def read_pictures(files: Sequence[str | Path], inputs: ImageInputs) -> Tensor:
    """The pictures in files, as the evaluation of the training reads them: float32 (n, channels, size, size).

    Pictures of any mode and size are read as `decode` describes. Raises FileNotFoundError or ValueError (one line) for
    a file that is not there, or gives no picture.
    """
    images = ImagesConfig(
        size=inputs.size, channels=len(inputs.mean), crop=inputs.crop, interpolation=inputs.interpolation
    )
    transform = make_transform(images, inputs.mean, inputs.std, training=False)
    return torch.stack([transform(_decoded(Path(file), images.channels)) for file in files])


def _decoded(file: Path, channels: int) -> Image.Image:
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name the pictures in it, such as {file}/*.png")
    if not file.is_file():
        raise FileNotFoundError(f"there is no picture at {file}")
    try:
        return decode(file.read_bytes(), channels=channels)
    except UnreadablePicture as error:
        raise ValueError(f"{file} gives no picture: {error}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
