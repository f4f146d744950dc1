"""The table [data.images] of a recipe: a dataset of pictures, in place of text, and what is done to them."""

import math
from dataclasses import dataclass, field
from typing import Literal

from matmix.data.storage.remote import refuse_secrets

_CROPS = ("random_resized", "shift", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesConfig:
    path: str = ""
    """Dataset of pictures: a folder made by `matmix prepare-images`, or the URL of a copy of one. Empty = none; the
    data is then another one."""
    mixture: dict[str, float] = field(default_factory=dict)
    """Datasets of the same classes with their weights (any scale), in place of `path`. In each stretch of samples they
    have shares in that proportion; validation takes the validation splits of all of them, once."""
    validation_path: str = ""
    """Dataset whose validation split is used instead of those of `path` or `mixture`."""
    classes: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers; empty = those of the dataset. A run keeps them here."""
    size: int = 224
    """Height and width of what the model reads, in pixels."""
    channels: int = 3
    """3 for red, green and blue; 1 for brightness."""
    mean: tuple[float, ...] = ()
    """Of each channel, from 0 to 1, subtracted; empty = that of the training split."""
    std: tuple[float, ...] = ()
    """Of each channel, divided by; empty = that of the training split."""
    interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic"
    """How pictures are resized. random: bilinear or bicubic in training, bicubic in evaluation."""
    crop: float = 0.875
    """Evaluation: share of the resized picture's short side that the central crop keeps."""
    train_crop: Literal["random_resized", "shift", "none"] = "random_resized"
    """Training: a part of random size and shape, resized; the whole picture, resized and shifted by up to `shift`
    pixels; or the crop of the evaluation."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the picture's area, for random_resized."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Smallest and largest ratio of width to height, for random_resized."""
    shift: int = 4
    """Pixels, for shift; what comes from outside of the picture is black."""
    hflip: float = 0.5
    """Probability of mirroring left and right."""
    vflip: float = 0.0
    """Probability of mirroring top and bottom."""
    color_jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation; not applied beside `augment`."""
    augment: str = ""
    """RandAugment, AutoAugment or AugMix in timm's notation, such as "rand-m9-mstd0.5-inc1". Empty = none."""
    erasing: float = 0.0
    """Probability of erasing a rectangle."""
    erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    """What it is filled with: the mean, one random colour, or random pixels."""
    erasing_count: int = 1
    """Rectangles, at most."""
    repeats: int = 1
    """Repeated augmentation: each picture comes so often in a row, augmented anew each time, and an epoch of as many
    samples takes only that share of the pictures."""
    mixup: float = 0.0
    """Parameter of the beta distribution of mixup; 0 = none."""
    cutmix: float = 0.0
    """Parameter of the beta distribution of CutMix; 0 = none. With both, each draw takes one of them."""
    mix_probability: float = 1.0
    """Probability that a draw mixes at all."""
    mix_switch: float = 0.5
    """Probability of CutMix where there are both."""
    mix_mode: Literal["batch", "pair"] = "batch"
    """One draw for each global batch, or for each pair of pictures in it."""
    smoothing: float = 0.0
    """Label smoothing: so much of the target is spread over all classes."""

    @property
    def datasets(self) -> dict[str, float]:
        """Paths of the datasets to train on, and their weights; empty where there are none."""
        return dict(self.mixture) or ({self.path: 1.0} if self.path else {})

    @property
    def named(self) -> str:
        """The datasets, for messages."""
        return ", ".join(self.datasets)

    @property
    def mixes(self) -> bool:
        """Whether training pictures are mixed with others."""
        return self.mix_probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def soft(self) -> bool:
        """Whether training targets are shares of the classes instead of their numbers."""
        return self.mixes or self.smoothing > 0

    def __post_init__(self) -> None:
        for name in ("path", "mixture", "validation_path"):
            refuse_secrets(getattr(self, name), f"data.images.{name}")
        if self.path and self.mixture:
            raise ValueError("data.images.path and data.images.mixture are both given: keep one of them")
        for path, weight in self.mixture.items():
            if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
                raise ValueError(f"data.images.mixture: the weight of {path} must be a positive number, got {weight}")
        if self.validation_path and not self.datasets:
            raise ValueError("data.images has no path: name the pictures to train on, too")
        for name, fine, allowed in (
            ("size", self.size >= 1, "at least 1"),
            ("channels", self.channels in (1, 3), "1 or 3"),
            ("interpolation", self.interpolation in ("bilinear", "bicubic", "random"), "bilinear, bicubic or random"),
            ("crop", 0 < self.crop <= 1, "in (0, 1]"),
            ("train_crop", self.train_crop in _CROPS, f"one of {', '.join(_CROPS)}"),
            ("scale", _is_range(self.scale) and self.scale[1] <= 1, "two shares in (0, 1], the smaller first"),
            ("ratio", _is_range(self.ratio), "two positive numbers, the smaller first"),
            ("shift", self.shift >= 0, "0 or more"),
            ("color_jitter", self.color_jitter >= 0, "0 or more"),
            ("erasing_mode", self.erasing_mode in ("const", "rand", "pixel"), "const, rand or pixel"),
            ("erasing_count", self.erasing_count >= 1, "at least 1"),
            ("repeats", self.repeats >= 1, "at least 1"),
            ("mixup", self.mixup >= 0, "0 or more"),
            ("cutmix", self.cutmix >= 0, "0 or more"),
            ("mix_mode", self.mix_mode in ("batch", "pair"), "batch or pair"),
            ("smoothing", 0 <= self.smoothing < 1, "in [0, 1)"),
            *(
                (name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
                for name in ("hflip", "vflip", "erasing", "mix_probability", "mix_switch")
            ),
            *((name, len(getattr(self, name)) in (0, self.channels), "one a channel") for name in ("mean", "std")),
            ("std", all(value > 0 for value in self.std), "positive"),
        ):
            if not fine:
                raise ValueError(f"data.images.{name} must be {allowed}, got {getattr(self, name)!r}")


def _is_range(values: tuple[float, ...]) -> bool:
    return len(values) == 2 and 0 < values[0] <= values[1]
