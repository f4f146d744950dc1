"""Prediction of the pixels of masked parts of images, to pretrain on pictures without labels (arXiv 2111.09886)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch, image_batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.rows import Failure, Rows
from matmix.data.rng import MASKS, generator
from matmix.model.images.patches import cut_patches
from matmix.train.tasks.base import Loss, Metric, Task


@dataclass(frozen=True, slots=True)
class MaskedImageOptions:
    ratio: float = 0.6
    """Share of the squares of an image that are hidden."""
    square: int = 32
    """Height and width of a square, in pixels: a multiple of model.image.patch, and a divisor of the image's size."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(f"objective.options.ratio must lie between 0 and 1, got {self.ratio}")
        if self.square < 1:
            raise ValueError(f"objective.options.square must be 1 or more, got {self.square}")


class MaskedRows:
    """Adds to the images of `rows` which of their squares are hidden: `extra["masked"]`, bool (B, side, side), of each
    image drawn from (seed, number of the sample). Empty places of a batch have none."""

    def __init__(self, rows: Rows, side: int, options: MaskedImageOptions, seed: int) -> None:
        self.rows, self.side, self.seed = rows, side, seed
        self.limit, self.samples_per_epoch = rows.limit, rows.samples_per_epoch
        self.hidden = hidden_squares(side, options)

    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        batch = self.rows.__getitems__(samples)
        if isinstance(batch, Failure):
            return batch
        masked = np.zeros((len(samples), self.side**2), dtype=bool)
        for row, sample in enumerate(samples):
            if batch.examples[row] >= 0:
                masked[row, generator(self.seed, 0, MASKS, sample).permutation(self.side**2)[: self.hidden]] = True
        batch.extra["masked"] = torch.from_numpy(masked).view(-1, self.side, self.side)
        return batch


def hidden_squares(side: int, options: MaskedImageOptions) -> int:
    """Returns how many of the side x side squares of an image are hidden: one at least, and not all."""
    return min(max(1, round(options.ratio * side**2)), side**2 - 1)


class MaskedImage(Task):
    """The mean absolute difference between the pixels of hidden squares, normalised as the model reads them, and what
    the model says of them. A target is a square. Labels are not looked at."""

    architectures = ("masked_image",)
    Options = MaskedImageOptions
    modalities = ("pictures",)
    recorded = ("mean_colour_error",)
    loss_metric = Metric(name="loss", title="loss", unit="standard deviations")
    metrics = (Metric(name="mean_colour_error", title="error of the mean colour"),)

    def make_loader(self, data: DataConfig, *, split: str, seed: int = 0, **options: Any) -> Loader:
        size, square = data.images.size, self.options.square
        side, rest = divmod(size, square)
        if rest or side < 2:
            raise ValueError(
                f"objective.options.square = {square} does not divide data.images.size = {size} into two or more; "
                "set one of the two"
            )
        loader = super().make_loader(data, split=split, seed=seed, **options)
        loader.dataset = MaskedRows(loader.dataset, side, self.options, seed)
        loader.fingerprint |= {"objective": "masked images", "masking": [self.options.ratio, square]}
        return loader

    def count_targets(self, batch: Batch) -> int:
        return int(batch.extra["masked"].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        masked, images = batch.extra["masked"], batch.inputs
        predicted = self.forward(model, batch).float()
        patch = math.isqrt(predicted.shape[2] // images.shape[1])
        loss = _summed_error(from_patches(predicted, images, patch), images, masked)
        error = _summed_error(_mean_colour(images, masked)[:, :, None, None], images, masked)
        return Loss(loss, loss.detach(), {"mean_colour_error": error})

    def example_batch(self, inputs: Tensor) -> Batch:
        side = max(2, inputs.shape[2] // self.options.square)
        masked = torch.zeros(len(inputs), side**2, dtype=torch.bool)
        masked[:, : hidden_squares(side, self.options)] = True
        labels = torch.zeros(len(inputs), dtype=torch.long)
        return image_batch(inputs, labels, extra={"masked": masked.view(-1, side, side)})


def from_patches(pixels: Tensor, images: Tensor, patch: int) -> Tensor:
    """Returns the inverse of `cut_patches`, in the shape of `images` (B, C, H, W)."""
    batch, channels, height, width = images.shape
    parts = pixels.view(batch, height // patch, width // patch, channels, patch, patch)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def _summed_error(predicted: Tensor, images: Tensor, masked: Tensor) -> Tensor:
    """Returns the sum over the hidden squares of the mean absolute difference of their pixels."""
    errors = cut_patches((predicted - images).abs(), images.shape[2] // masked.shape[1]).mean(2)
    return (errors * masked.flatten(1)).sum()


def _mean_colour(images: Tensor, masked: Tensor) -> Tensor:
    """Returns (B, C): the mean over the squares that are seen, what one would guess without a model."""
    side = images.shape[2] // masked.shape[1]
    seen = (~masked).flatten(1).float()
    channels = cut_patches(images, side).unflatten(2, (images.shape[1], -1)).mean(3)
    return (channels * seen[:, :, None]).sum(1) / seen.sum(1, keepdim=True)
