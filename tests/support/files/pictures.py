"""Small pictures, files of them, and datasets prepared of those."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from matmix.data.prepare import command
from matmix.data.prepare.pictures import PrepareImagesConfig

CLASSES = ("cat", "dog", "owl")


def pixels(seed: int, width: int = 12, height: int = 10, channels: int = 3) -> np.ndarray:
    """uint8 (height, width, channels): a random picture that is smooth enough for JPEG."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 3, channels), dtype=np.uint8)
    bands = [Image.fromarray(coarse[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)]
    return np.stack([np.asarray(band) for band in bands], axis=-1)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def samples(each: int = 8, kind: str = "PNG") -> list[tuple[str, int, bytes]]:
    """Name, class and file of `each` pictures of each class, of different sizes."""
    return [
        (f"{label}-{n}", label, encoded(pixels(100 * label + n, 10 + n % 4, 9 + n % 3), kind))
        for label in range(len(CLASSES))
        for n in range(each)
    ]


def write_tree(folder: Path, given: list[tuple[str, int, bytes]]) -> Path:
    """A folder for each class."""
    for name, label, data in given:
        path = folder / CLASSES[label] / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """A .tar file of these members."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def prepare(source: Path | str, out: Path, **options: Any) -> Path:
    """The dataset of a source, in the folder `out`."""
    command.prepare(PrepareImagesConfig(inputs=(str(source),), out=str(out), **{"processes": 1, **options}))
    return out
