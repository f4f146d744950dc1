"""From a decoded picture to what the model reads: augmentation in training, resizing and a central crop in evaluation.

The transforms are timm's (`create_transform`) and torchvision's. They draw from the global generators
(`matmix.data.images.randomness`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image

from matmix.data.config import ImagesConfig

Transform = Callable[[Image.Image], torch.Tensor]


def make_transform(config: ImagesConfig, mean: Sequence[float], std: Sequence[float], *, training: bool) -> Transform:
    """A function from a picture to float32 (channels, size, size), normalised.

    mean, std: one a channel. Raises ValueError (one line) for an unknown `augment`, or where timm is not installed.
    """
    try:
        from timm.data import create_transform
    except ImportError as error:
        raise ValueError(
            f"pictures need timm and torchvision ({error}): in the clone of matmix, pip install -e '.[vision]'"
        ) from None
    # Libraries augment colours: for them a picture of one channel has three equal ones until the end.
    coloured = training and (config.augment or config.color_jitter or config.erasing)
    channels = 3 if config.channels == 3 or coloured else 1
    options = {
        "input_size": config.size, "mean": tuple(mean) * (channels // len(mean)),
        "std": tuple(std) * (channels // len(std)),
    }  # fmt: skip
    fixed = "bicubic" if config.interpolation == "random" else config.interpolation
    if not training:
        transform = create_transform(
            **options, is_training=False, interpolation=fixed, crop_pct=config.crop, crop_mode="center"
        )
        return _Channels(transform, channels, config.channels)
    try:
        stages = create_transform(
            **options,
            is_training=True,
            scale=config.scale,
            ratio=config.ratio,
            hflip=config.hflip,
            vflip=config.vflip,
            color_jitter=config.color_jitter or None,
            auto_augment=config.augment or None,
            interpolation=config.interpolation,
            re_prob=config.erasing,
            re_mode=config.erasing_mode,
            re_count=config.erasing_count,
            separate=True,
        )
    except (AssertionError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        # timm's parser of that notation asserts.
        raise ValueError(
            f"data.images.augment = {config.augment!r} is no augmentation that timm knows ({error or 'unknown'}); "
            'an example is "rand-m9-mstd0.5-inc1"'
        ) from None
    _keep_no_bits(stages)
    if config.train_crop != "random_resized":
        stages = (_whole(config, fixed), *stages[1:])
    return _Channels(_Chain(stages), channels, config.channels)


def _whole(config: ImagesConfig, interpolation: str) -> Callable[[Image.Image], Image.Image]:
    """What stands in place of the random crop: the whole picture, mirrored or not."""
    from torchvision.transforms import v2

    mode = v2.InterpolationMode(interpolation)
    if config.train_crop == "shift":
        size = [config.size, config.size]
        parts = [v2.Resize(size, mode), v2.RandomCrop(size, padding=config.shift)]
    else:
        parts = [v2.Resize(int(config.size / config.crop), mode), v2.CenterCrop(config.size)]
    flips = ((config.hflip, v2.RandomHorizontalFlip), (config.vflip, v2.RandomVerticalFlip))
    return v2.Compose([*parts, *(flip(share) for share, flip in flips if share)])


def _keep_no_bits(part: Any) -> None:
    """The strongest posterisation of the published trainings keeps no bit of a colour: black. New releases of Pillow
    refuse that, and timm asks for it."""
    from timm.data import auto_augment

    if isinstance(part, auto_augment.AugmentOp) and part.aug_fn is auto_augment.posterize:
        part.aug_fn = _posterize
    inner = part if isinstance(part, list | tuple) else ()
    for some in (inner, *(getattr(part, name, ()) for name in ("transforms", "ops", "policy"))):
        for one in some:
            _keep_no_bits(one)


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    from timm.data import auto_augment

    return auto_augment.posterize(image, bits, **options) if bits >= 1 else image.point(lambda value: 0)


class _Chain:
    def __init__(self, stages: Sequence[Callable]) -> None:
        self.stages = stages

    def __call__(self, image: Image.Image) -> torch.Tensor:
        for stage in self.stages:
            image = stage(image)
        return image


class _Channels:
    def __init__(self, transform: Transform, given: int, kept: int) -> None:
        self.transform, self.kept = transform, kept
        self.mode = "RGB" if given == 3 else "L"

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.transform(image.convert(self.mode))[: self.kept].contiguous()
