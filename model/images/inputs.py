"""What a model has to be given of a picture: how the pictures of its training's evaluation were made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

INTERPOLATIONS = ("bicubic", "bilinear")


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

    def __post_init__(self) -> None:
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError(f"mean = {self.mean} and std = {self.std}: give one or three numbers each, std above 0")
        if not 0 < self.crop <= 1 or self.size < 1:
            raise ValueError(f"crop = {self.crop}, size = {self.size}: crop lies above 0 and up to 1, size from 1 on")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation = {self.interpolation!r}; known: {', '.join(INTERPOLATIONS)}")
