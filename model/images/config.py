"""The options of models that read images."""

from dataclasses import dataclass
from typing import Literal

from matmix.model.options import check_words


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageConfig:
    """How a model reads images."""

    size: int = 224
    """Height and width of the images that it is trained on, in pixels. It takes others too, of any multiples of
    `patch`."""
    patch: int = 16
    """Height and width of a patch, in pixels."""
    channels: int = 3
    """Channels of an image: 3 for RGB, 1 for grey."""
    stem: Literal["linear", "conv"] = "linear"
    """linear: each patch by itself, in one matrix; conv: convolutions of width 3 and stride 2 down to one vector for
    each patch, whose side is then a power of two."""
    positions: Literal["learned", "sincos", "none"] = "learned"
    """One learned vector for each patch, interpolated for images of another size; fixed sines and cosines of rows and
    columns, stretched to images of another size; or none, where the order of the scan tells."""
    class_token: Literal["none", "first", "middle"] = "none"
    """A learned vector that stands before the patches or in the middle of them."""
    class_outside: bool = False
    """The class token is not part of the scan: between it and the patches nothing decays. For mixers lion_lit, lion_d
    and lion_s."""
    pooling: Literal["mean", "cls"] = "mean"
    """What is classified: the mean over all patches, or the class token."""
    scan: Literal["row", "column", "both", "snake", "hilbert"] = "row"
    """The order in which mixers meet the patches: row by row, column by column, the mean of both, the mean of both with
    every second row and column backwards, or along a Hilbert curve."""

    def __post_init__(self) -> None:
        for name in ("size", "patch", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.image.{name} = {getattr(self, name)}: must be 1 or more")
        check_words(self, "model.image.")
        if self.size % self.patch:
            near = max(self.size // self.patch, 1) * self.patch
            raise ValueError(
                f"model.image.size = {self.size} is no multiple of model.image.patch = {self.patch}; "
                f"use {near} or {near + self.patch}"
            )
        if self.stem == "conv" and (self.patch < 2 or self.patch & (self.patch - 1)):
            raise ValueError(
                f'model.image.patch = {self.patch}: stem = "conv" halves images until a patch is one position; '
                "use a power of two from 2 on"
            )
        if self.class_token == "none":
            if self.pooling == "cls":
                raise ValueError(
                    'model.image.pooling = "cls" takes a class token; set model.image.class_token, or pooling = "mean"'
                )
            if self.class_outside:
                raise ValueError('model.image.class_outside = true, but there is no class token (class_token = "none")')

    @property
    def side(self) -> int:
        """Patches along one side of an image of `size`."""
        return self.size // self.patch

    @property
    def length(self) -> int:
        """Positions of an image of `size`: patches, and the class token."""
        return self.side**2 + self.class_tokens

    @property
    def class_tokens(self) -> int:
        """1 with a class token, else 0."""
        return 0 if self.class_token == "none" else 1

    def class_place(self, patches: int) -> int:
        """The position of the class token among `patches` patches."""
        return patches // 2 if self.class_token == "middle" else 0


# -- what a model has to be given of a picture: how the pictures of its training's evaluation were made --------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInputs:
    """The short side of a picture is resized to size / crop pixels, a square of `size` is cut out of the middle, values
    from 0 to 1 are normalised. Raises ValueError (one line) for values that mean nothing."""

    mean: tuple[float, ...]
    """Subtracted from each channel."""
    std: tuple[float, ...]
    """Divided by."""
    crop: float = 0.875
    """Share of the resized short side that is kept."""
    size: int = 224
    """Pixels along each side."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How pictures are resized."""
    background: int = 255
    """Brightness, 0 to 255, behind transparent pixels."""

    def __post_init__(self) -> None:
        if self.background not in range(256):
            raise ValueError(f"background = {self.background}: it lies between 0 and 255")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError(f"mean = {self.mean} and std = {self.std}: give one or three numbers each, std above 0")
        if not 0 < self.crop <= 1 or self.size < 1:
            raise ValueError(f"crop = {self.crop}, size = {self.size}: crop lies above 0 and up to 1, size from 1 on")
        check_words(self, "")
