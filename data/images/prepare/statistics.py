"""What is counted of pictures: how many of each class, their sizes, and sums over their pixels.

All are whole numbers in one array, so that they can be saved with the state of a preparation and do not depend on how
the work was divided.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from matmix.data.manifest import ImagesInfo

_LEVELS = np.arange(256, dtype=np.int64)
# Pixels, their sums (R, G, B, L), sums of their squares, pictures, sums of widths and heights, smallest and largest.
_SUMS, _SQUARES, _PICTURES, _SIZES, _SMALLEST, _LARGEST, _COUNTS = 1, 5, 9, 10, 12, 14, 16
_UNBOUNDED = 1 << 40


def picture_statistics(image: Image.Image) -> np.ndarray:
    """int64 (16,) of one picture of mode RGB: what `Statistics.add` takes."""
    levels = np.array(image.histogram() + image.convert("L").histogram(), dtype=np.int64).reshape(4, 256)
    width, height = image.size
    sums, squares = levels @ _LEVELS, levels @ _LEVELS**2
    return np.array([width * height, *sums, *squares, 1, width, height, width, height, width, height])


class Statistics:
    """Sums over the training split, and the pictures of each class in each split."""

    def __init__(self, classes: int, splits: int) -> None:
        self.classes = classes
        self.values = np.zeros(_COUNTS + splits * classes, dtype=np.int64)
        self.values[_SMALLEST:_LARGEST] = _UNBOUNDED

    def count(self, split: int, label: int) -> None:
        """Counts a picture of a class."""
        self.values[_COUNTS + split * self.classes + label] += 1

    def add(self, picture: np.ndarray) -> None:
        """Adds the numbers of a picture."""
        sums = self.values
        sums[:_SMALLEST] += picture[:_SMALLEST]
        sums[_SMALLEST:_LARGEST] = np.minimum(sums[_SMALLEST:_LARGEST], picture[_SMALLEST:_LARGEST])
        sums[_LARGEST:_COUNTS] = np.maximum(sums[_LARGEST:_COUNTS], picture[_LARGEST:_COUNTS])

    def join(self, others: np.ndarray) -> None:
        """Adds the values of other pictures of the same classes and splits."""
        self.add(others[:_COUNTS])
        self.values[_COUNTS:] += others[_COUNTS:]

    def info(self, classes: tuple[str, ...], splits: list[str], background: int) -> ImagesInfo:
        """For the manifest; of a part without pictures for training all numbers are 0."""
        values = (self.values if self.values[_PICTURES] else np.zeros_like(self.values)).tolist()
        values[_COUNTS:] = self.values[_COUNTS:].tolist()
        pixels, pictures = values[0] or 1, values[_PICTURES] or 1
        means = [total / pixels for total in values[_SUMS:_SQUARES]]
        squares = [total / pixels for total in values[_SQUARES:_PICTURES]]
        spread = [math.sqrt(max(0.0, q - m * m)) for q, m in zip(squares, means, strict=True)]
        sizes = [
            (values[_SMALLEST + axis], round(values[_SIZES + axis] / pictures, 2), values[_LARGEST + axis])
            for axis in range(2)
        ]
        counts = {split: tuple(values[_COUNTS + n * self.classes :][: self.classes]) for n, split in enumerate(splits)}
        return ImagesInfo(
            classes=classes,
            counts=counts,
            mean=tuple(round(mean / 255, 6) for mean in means),
            std=tuple(round(value / 255, 6) for value in spread),
            width=sizes[0],
            height=sizes[1],
            background=background,
        )
