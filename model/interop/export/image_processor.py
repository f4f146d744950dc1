"""The image processor of exports: from pictures to what the model reads, with Pillow and NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class MatmixImageProcessor(BaseImageProcessor):
    """Resizes the short side to size / crop, cuts out the middle, and normalises, as the evaluation of the training.

    Its fields are those of `ImageInputs`.
    """

    model_input_names: ClassVar[list[str]] = ["pixel_values"]

    def __init__(
        self,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        crop: float = 0.875,
        size: int = 224,
        interpolation: str = "bicubic",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.mean, self.std = list(mean), list(std)
        self.crop, self.size, self.interpolation = crop, size, interpolation

    def __call__(self, images: Any, **kwargs: Any) -> BatchFeature:
        return self.preprocess(images, **kwargs)

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        """One picture or a list of them (of Pillow, or arrays (height, width, channels) or (height, width) of 8 bits)
        -> {"pixel_values": (B, channels, size, size)}."""
        several = images if isinstance(images, list | tuple) else [images]
        values = np.stack([self.pixels(image) for image in several])
        return BatchFeature({"pixel_values": values}, tensor_type=return_tensors)

    def pixels(self, image: Any) -> np.ndarray:
        """float32 (channels, size, size) of one picture."""
        if isinstance(image, torch.Tensor):
            image = image.numpy()
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8:
                raise ValueError(f"an image of {image.dtype}: give arrays of 8 bits (uint8), or images of Pillow")
            image = Image.fromarray(image)
        image = with_three_or_one(ImageOps.exif_transpose(image), len(self.mean))
        short = int(self.size / self.crop)
        scale = short / min(image.size)
        sides = [short if side == min(image.size) else int(side * scale) for side in image.size]
        image = image.resize(sides, Image.Resampling[self.interpolation.upper()])
        left, top = (round((side - self.size) / 2) for side in image.size)
        image = image.crop((left, top, left + self.size, top + self.size))
        values = np.asarray(image, dtype=np.float32).reshape(self.size, self.size, -1) / 255
        mean, std = np.asarray(self.mean, dtype=np.float32), np.asarray(self.std, dtype=np.float32)
        return ((values - mean) / std).transpose(2, 0, 1)


def with_three_or_one(image: Image.Image, channels: int) -> Image.Image:
    """An image of red, green and blue, or of brightness; white shows behind transparent pixels, and 16 bits of grey
    become 8."""
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        base = Image.new("RGBA", image.size, (255, 255, 255, 255))
        base.alpha_composite(image.convert("RGBA"))
        image = base.convert("RGB")
    return image.convert("RGB" if channels == 3 else "L")
