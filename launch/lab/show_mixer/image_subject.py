"""Loads what `matmix show-mixer --image` shows: a model of images, trained or with a recipe's initial weights, and a
picture as it reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from matmix.launch.lab.show_mixer.subject import initial_model, label_of, name_of, read_recipe, where_of
from matmix.model.backbone import Backbone
from matmix.model.images.config import ImageConfig, ImageInputs
from matmix.train.state import Weights
from matmix.use.opening import image_inputs, open_model
from matmix.use.pictures import read_pictures


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSubject:
    """A model of images and the picture that it is shown with."""

    name: str
    """Name of the folder of its pages."""
    where: str
    """The source as the pages name it: a path, a URL or the name of a recipe."""
    state: str
    """Which weights it has: "step 1,000", "initial weights" or "export"."""
    label: str
    """The weights as a part of a file's name, such as "step-1000"."""
    model: Backbone
    file: str
    """Of the picture."""
    images: torch.Tensor
    """(1, channels, size, size), as the model reads it"""
    picture: np.ndarray
    """(size, size, 3), the same before normalisation, from 0 to 1"""
    notes: list[str]
    overrides: tuple[str, ...] = ()
    """Changes of a recipe."""

    @property
    def image(self) -> ImageConfig:
        """How the model reads images."""
        return self.model.config.image

    @property
    def side(self) -> int:
        """Patches along one side of the picture."""
        return self.images.shape[-1] // self.image.patch


def trained_on_images(source: str, file: str, step: int | None, weights: Weights = "raw") -> ImageSubject:
    """The model of a run or an export. Raises FileNotFoundError or ValueError (one line)."""
    opened = open_model(source, step=step, device="cpu", weights=weights)
    images, picture = _read(file, opened.image_inputs, opened.model)
    named = (name_of(source), where_of(source), opened.state, label_of(opened))
    return ImageSubject(*named, opened.model, file, images, picture, [])


def fresh_on_images(source: str, file: str, overrides: Sequence[str]) -> ImageSubject:
    """The model that training a recipe starts from. Raises FileNotFoundError or ValueError (one line)."""
    name, config = read_recipe(source, overrides)
    if config.model.model_class.inputs != "images":
        raise ValueError(f"{source} trains a {config.model.architecture}, which reads no pictures; give a --text")
    notes = []
    try:
        inputs = image_inputs(config)
    except FileNotFoundError:
        inputs = None
    if inputs is None:
        grey, images = (0.5,) * config.model.image.channels, config.data.images
        inputs = ImageInputs(mean=grey, std=grey, crop=images.crop, size=config.model.image.size)
        where = images.named or "the recipe's data path"
        notes.append(f"The picture is normalised by a mean and a spread of 0.5: there is no dataset at {where}.")
    model = initial_model(config.model, config.seed)
    found = _read(file, inputs, model)
    return ImageSubject(name, source, "initial weights", "initial", model, file, *found, notes, tuple(overrides))


def _read(file: str, inputs: ImageInputs, model: Backbone) -> tuple[torch.Tensor, np.ndarray]:
    images = read_pictures([file], inputs)
    image = model.config.image
    if images.shape[1] != image.channels or images.shape[2] % image.patch:
        raise ValueError(
            f"pictures of {inputs.size} pixels and {len(inputs.mean)} channels do not fit a model of patches of "
            f"{image.patch} pixels and {image.channels} channels"
        )
    pixels = images[0] * torch.tensor(inputs.std).view(-1, 1, 1) + torch.tensor(inputs.mean).view(-1, 1, 1)
    return images, pixels.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()
