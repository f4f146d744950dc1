"""From a decoded picture to what the model reads: augmentation in training, resizing and a central crop in evaluation,
and mixup and CutMix of the pictures of a global batch.

The transforms are timm's (`create_transform`) and torchvision's, which draw from the global generators of Python, numpy
and torch. In a global batch, position i is mixed with i + r or i - r (r = `repeats`), so that copies of a picture never
meet each other; a position without a partner stays as it is. How a pair is mixed is drawn from (seed, step), or with
mode "pair" from (seed, number of the pair), whatever ranks and micro-batches it lies on. The formulas are timm's.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from matmix.data.artifacts import from_extra
from matmix.data.config import ImagesConfig
from matmix.data.rng import MIXING, generator


@contextlib.contextmanager
def borrowed_generators() -> Iterator[None]:
    """Gives the global generators (on the CPU) back as they were: a reading process may be the training process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(source: np.random.Generator) -> None:
    """Sets all three to what the next number of `source` says."""
    seed = int(source.integers(1 << 63))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs as well


_THINNEST = 32
"""The long side of a picture of which all is resized, in short sides."""
Transform = Callable[[Image.Image], torch.Tensor]


def make_transform(config: ImagesConfig, mean: Sequence[float], std: Sequence[float], *, training: bool) -> Transform:
    """Returns a function from a picture to float32 (channels, size, size), normalised. mean, std: one a channel. Raises
    ValueError (one line) for an unknown `augment`, or where timm is not installed."""
    with from_extra("vision", "pictures need timm and torchvision"):
        from timm.data import create_transform
        from torchvision.transforms import Compose
    # Libraries augment colours: for them a picture of one channel has three equal ones until the end.
    coloured = training and (config.augment or config.color_jitter or config.erasing)
    channels = 3 if config.channels == 3 or coloured else 1
    mean, std = (tuple(values) * (channels // len(values)) for values in (mean, std))
    options = {"input_size": config.size, "mean": mean, "std": std, "is_training": training}
    fixed = "bicubic" if config.interpolation == "random" else config.interpolation
    if not training:
        transform = create_transform(**options, interpolation=fixed, crop_pct=config.crop, crop_mode="center")
        return _Channels(Compose([_without_far_ends, transform]), channels, config.channels)
    try:
        stages = create_transform(
            **options,
            **{name: getattr(config, name) for name in ("scale", "ratio", "hflip", "vflip", "interpolation")},
            color_jitter=config.color_jitter or None,
            auto_augment=config.augment or None,
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
    return _Channels(Compose(stages), channels, config.channels)


def _without_far_ends(image: Image.Image) -> Image.Image:
    """Cuts off a very thin picture what a central crop leaves out: to resize all of it could fill the memory."""
    sizes = image.size
    most = [min(size, _THINNEST * min(sizes) + size % 2) for size in sizes]
    left, top = ((size - kept) // 2 for size, kept in zip(sizes, most, strict=True))
    return image if most == list(sizes) else image.crop((left, top, left + most[0], top + most[1]))


def _whole(config: ImagesConfig, interpolation: str) -> Callable[[Image.Image], Image.Image]:
    """Returns the stage in place of the random crop: the whole picture, mirrored or not."""
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
    """Makes posterisation to no bits, which the strongest published training asks for and new releases of Pillow
    refuse, give black."""
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


class _Channels:
    def __init__(self, transform: Transform, given: int, kept: int) -> None:
        self.transform, self.kept = transform, kept
        self.mode = "RGB" if given == 3 else "L"

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.transform(image.convert(self.mode))[: self.kept].contiguous()


@dataclass(frozen=True, slots=True)
class Mix:
    """The way one picture is mixed with its partner."""

    share: float
    """Share of the picture itself in the result and in the target; 1 = not mixed."""
    box: tuple[int, int, int, int] | None = None
    """CutMix: top, bottom, left and right of what comes from the partner. None = mixup."""

    def apply(self, image: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        """Returns the mixture of two pictures, each (C, H, W)."""
        if self.box is None:
            return image * self.share + partner * (1.0 - self.share)
        top, bottom, left, right = self.box
        mixed = image.clone()
        mixed[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
        return mixed


def partner_of(sample: int, global_batch: int, repeats: int) -> int | None:
    """Returns the number of the sample that is mixed with `sample`, in the same global batch."""
    place = sample % global_batch
    other = place + repeats if place % (2 * repeats) < repeats else place - repeats
    return sample - place + other if other < global_batch else None


def draw_mix(config: ImagesConfig, seed: int, sample: int, global_batch: int) -> Mix:
    """Draws how `sample` and its partner are mixed. To be called where the global generators are borrowed."""
    from timm.data.mixup import cutmix_bbox_and_lam

    item = sample // global_batch
    if config.mix_mode == "pair":
        partner = partner_of(sample, global_batch, config.repeats)
        item = sample if partner is None else min(sample, partner)
    seed_generators(generator(seed, 0, MIXING, item))
    if np.random.rand() >= config.mix_probability:
        return Mix(1.0)
    cut = config.cutmix > 0
    if config.mixup > 0 and config.cutmix > 0:
        cut = np.random.rand() < config.mix_switch
    alpha = config.cutmix if cut else config.mixup
    share = float(np.random.beta(alpha, alpha))
    if not cut:
        return Mix(share)
    box, share = cutmix_bbox_and_lam((config.channels, config.size, config.size), share)
    return Mix(float(share), tuple(int(edge) for edge in box))


def soft_target(label: int, classes: int, smoothing: float) -> torch.Tensor:
    """Returns float32 (classes,): 1 for the class, of which `smoothing` is spread evenly over all."""
    target = torch.full((classes,), smoothing / classes)
    target[label] = 1.0 - smoothing + smoothing / classes
    return target
