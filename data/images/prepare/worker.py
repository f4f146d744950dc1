"""What processes do with a chunk: read the files, decode each to see that it is whole, and make them smaller."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from matmix.data.artifacts import one_line
from matmix.data.formats.base import pack, suffix_of
from matmix.data.images.decode import UnreadablePicture, decode
from matmix.data.images.prepare.base import Chunk
from matmix.data.images.prepare.config import PrepareImagesConfig
from matmix.data.images.prepare.statistics import picture_statistics
from matmix.data.prepare.validation import in_validation


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one picture."""

    document: np.ndarray | None
    """As `pack` gives it; None where the picture is corrupt."""
    statistics: np.ndarray | None
    label: int
    validation: bool
    reason: str = ""
    """Why it is corrupt, with its name."""


def begin(config: PrepareImagesConfig) -> Callable[[Chunk], list[Done]]:
    """A function that does the work of a chunk."""
    return lambda chunk: [
        _done(config, item.name, raw, int(label), chunk.validation)
        for item, label, raw in zip(chunk.items, chunk.labels, chunk.source.read(chunk.items), strict=True)
    ]


def _done(
    config: PrepareImagesConfig, name: str, raw: bytes | UnreadablePicture, label: int, validation: bool | None
) -> Done:
    try:
        if isinstance(raw, UnreadablePicture):
            raise raw
        image = decode(raw, background=config.background, megapixels=config.max_megapixels)
    except UnreadablePicture as error:
        return Done(None, None, label, bool(validation), one_line(f"{name}: {error}"))
    stored, image = _stored(config, raw, image)
    if validation is None:
        validation = in_validation(raw, config.validation_fraction)
    return Done(pack(stored, label), picture_statistics(image), label, validation)


def _stored(config: PrepareImagesConfig, raw: bytes, image: Image.Image) -> tuple[bytes, Image.Image]:
    """The bytes that are stored, and the picture in them (but for what an encoding loses)."""
    short, encoding = min(image.size), config.encoding
    smaller = 0 < config.short_side < short
    if not smaller and encoding == "keep":
        return raw, image
    if smaller:
        size = tuple(max(1, round(side * config.short_side / short)) for side in image.size)
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    if encoding == "keep":
        encoding = "jpeg" if suffix_of(raw) == "jpg" else "png"
    buffer = io.BytesIO()
    image.save(buffer, encoding, **({} if encoding == "png" else {"quality": config.quality}))
    return buffer.getvalue(), image
