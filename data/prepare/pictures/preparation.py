"""Prepares pictures: decodes each to see that it is whole, and makes large ones smaller.

The sums are whole numbers, so that they do not depend on how the work was divided: sums over the pixels of the training
split, and the pictures of each class in each split.
"""

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from matmix.data.artifacts import one_line, shell_line
from matmix.data.formats.base import PICTURES, pack, suffix_of
from matmix.data.images.decode import UnreadablePicture, decode
from matmix.data.manifest import ImagesInfo, Manifest, SplitInfo
from matmix.data.prepare.base import Chunk, Document, Documents, Malformed, Preparation
from matmix.data.prepare.pictures import PrepareImagesConfig
from matmix.data.prepare.pictures.sources import Classes, find_sources

# Places in the sums: pixels, their sums (R, G, B, L), sums of their squares, pictures, sums of widths and heights,
# smallest and largest widths and heights; then the pictures of each class in each split.
_SUMS, _SQUARES, _PICTURES, _SIZES, _SMALLEST, _LARGEST, _COUNTS = 1, 5, 9, 10, 12, 14, 16
_UNBOUNDED = 1 << 40
_LEVELS = np.arange(256, dtype=np.int64)


class PicturePreparation(Preparation):
    """Files of pictures on their way to shards."""

    name = "images"
    verb = PrepareImagesConfig.verb
    unit = "pictures"
    record = "pictures"
    broken = "corrupt"
    doing = "decoding"
    most_broken = "max_corrupt"
    content = "picture"
    broken_record = "{file}: {reason}"
    dtype = PICTURES.name
    config: PrepareImagesConfig

    def __init__(self, config: PrepareImagesConfig) -> None:
        sources = find_sources(config.inputs, config)
        held_out = find_sources(config.validation, config) if config.validation else []
        self.classes = Classes.find(sources, config.classes)
        for source in (*sources, *held_out):
            source.number_of = self.classes.number
        facts = {"kind": self.name, "validation": [], "classes": list(self.classes.names)}
        super().__init__(config, sources, held_out, **facts)

    def worker(self) -> Callable[[Chunk], Documents]:
        return functools.partial(work, self.config, len(self.classes.names), len(self.splits))

    def new_sums(self) -> np.ndarray:
        return _no_sums(len(self.classes.names), len(self.splits))

    @classmethod
    def add(cls, sums: np.ndarray, more: np.ndarray) -> None:
        smallest = np.minimum(sums[_SMALLEST:_LARGEST], more[_SMALLEST:_LARGEST])
        largest = np.maximum(sums[_LARGEST:_COUNTS], more[_LARGEST:_COUNTS])
        sums += more
        sums[_SMALLEST:_LARGEST], sums[_LARGEST:_COUNTS] = smallest, largest

    @classmethod
    def finish(cls, out: Path, options: Mapping[str, Any], splits: Sequence[str], sums: np.ndarray) -> dict[str, Any]:
        classes = tuple(options["classes"])
        if len(sums) != _COUNTS + len(splits) * len(classes):
            raise ValueError(f"{out}: {len(sums):,} sums do not fit {len(splits)} splits of {len(classes):,} classes")
        # A part without pictures for training says 0 of everything.
        values = (sums[:_COUNTS] if sums[_PICTURES] else np.zeros(_COUNTS, np.int64)).tolist()
        pixels, pictures = values[0] or 1, values[_PICTURES] or 1
        means = [total / pixels for total in values[_SUMS:_SQUARES]]
        squares = [total / pixels for total in values[_SQUARES:_PICTURES]]
        spread = [math.sqrt(max(0.0, q - m * m)) for q, m in zip(squares, means, strict=True)]
        width, height = (
            (values[_SMALLEST + axis], round(values[_SIZES + axis] / pictures, 2), values[_LARGEST + axis])
            for axis in range(2)
        )
        counts = sums[_COUNTS:].reshape(len(splits), len(classes)).tolist()
        info = ImagesInfo(
            classes=classes,
            counts={split: tuple(numbers) for split, numbers in zip(splits, counts, strict=True)},
            mean=tuple(round(mean / 255, 6) for mean in means),
            std=tuple(round(value / 255, 6) for value in spread),
            width=width,
            height=height,
            background=options["background"],
        )
        return {"images": info}

    @classmethod
    def amount(cls, split: SplitInfo) -> str:
        return f"{split.tokens / 1e6:,.1f} MB"

    @classmethod
    def summary(cls, manifest: Manifest) -> list[tuple[str, str]]:
        images = manifest.images
        counts = images.counts["train"]
        names = ", ".join(images.classes[:6]) + (", ..." if len(images.classes) > 6 else "")
        sides = {"width": images.width, "height": images.height}
        sizes = ", ".join(f"{side} {least} to {most}" for side, (least, _, most) in sides.items())
        mean, spread = (" ".join(f"{value:.3f}" for value in values[:3]) for values in (images.mean, images.std))
        lines = [
            ("classes", f"{len(images.classes):,} ({names}), {min(counts):,} to {max(counts):,} pictures each"),
            ("pixels", f"{sizes}; mean {mean}, spread {spread}"),
        ]
        if len(manifest.splits) == 1:
            lines.append(("validation", "none: --validation or --validation-fraction makes one"))
        return lines

    @classmethod
    def next_step(cls, manifest: Manifest, out: Path | str) -> str:
        words = ["matmix", "train", "RECIPE.toml", "--data.images.path", out]
        if len(manifest.splits) == 1:
            words += ["--data.images.validation-path", "ANOTHER_DATASET"]
        return shell_line(*words)


def work(config: PrepareImagesConfig, classes: int, splits: int, chunk: Chunk) -> Documents:
    """Reads and decodes the pictures of a chunk."""
    made: list[Document | Malformed] = []
    labels, images = [], []
    raws = chunk.source.read([item for item, _ in chunk.records])
    for line, ((item, label), raw) in enumerate(zip(chunk.records, raws, strict=True), start=chunk.start.line):
        try:
            if isinstance(raw, UnreadablePicture):
                raise raw
            image = decode(raw, background=config.background, megapixels=config.max_megapixels)
        except UnreadablePicture as error:
            made.append(Malformed(line, one_line(f"{item.name}: {error}")))
            continue
        stored, image = _stored(config, raw, image)
        document = pack(stored, label)
        made.append(Document(document, raw, len(document)))
        labels.append(label)
        images.append(picture_sums(image))
    documents = Documents.of(chunk, made, PICTURES.name, config.validation_fraction)
    documents.sums = _no_sums(classes, splits)
    for label, sums, held_out in zip(labels, images, documents.validation, strict=True):
        documents.sums[_COUNTS + held_out * classes + label] += 1
        if not held_out:
            PicturePreparation.add(documents.sums[:_COUNTS], sums)
    return documents


def _no_sums(classes: int, splits: int) -> np.ndarray:
    sums = np.zeros(_COUNTS + splits * classes, dtype=np.int64)
    sums[_SMALLEST:_LARGEST] = _UNBOUNDED
    return sums


def picture_sums(image: Image.Image) -> np.ndarray:
    """Returns int64 (16,), the sums of one picture of mode RGB."""
    levels = np.array(image.histogram() + image.convert("L").histogram(), dtype=np.int64).reshape(4, 256)
    width, height = image.size
    sums, squares = levels @ _LEVELS, levels @ _LEVELS**2
    return np.array([width * height, *sums, *squares, 1, width, height, width, height, width, height])


def _stored(config: PrepareImagesConfig, raw: bytes, image: Image.Image) -> tuple[bytes, Image.Image]:
    """Returns the bytes that are stored, and the picture in them (without the loss of an encoding)."""
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
