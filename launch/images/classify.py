"""`matmix classify RUN IMAGE ...`: the likeliest classes of pictures, by the image classifier of a run or an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro

from matmix.launch.images.classifiers import ImageModel, load_image_model, read_pictures
from matmix.train.arguments import RunFolder
from matmix.train.engine.full_state import Weights

_BATCH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classify:
    """Print the likeliest classes of pictures, by an image classifier."""

    source: RunFolder
    """Run directory, its URL, or an export."""
    images: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE")] = ()
    """Files of pictures: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM, of any size and mode."""
    top: int = 5
    """Classes to print for each picture."""
    step: int | None = None
    """Checkpoint of a run; default: the newest."""
    weights: Weights = "raw"
    """Of a run: the weights that were trained, or with ema their average."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prints the classes; the exit code. Raises FileNotFoundError or ValueError (one line)."""
        if not self.images:
            raise ValueError("name the pictures: matmix classify RUN IMAGE ...")
        if self.top < 1:
            raise ValueError(f"--top must be 1 or more, got {self.top}")
        loaded = load_image_model(self.source, step=self.step, weights=self.weights)
        missing = next((name for name in self.images if not Path(name).exists()), None)
        if missing is not None:
            raise FileNotFoundError(f"there is no picture at {missing}")
        print(f"{loaded.source}, {loaded.state}: {len(loaded.classes):,} classes")
        for name, found in zip(self.images, classify(loaded, self.images, top=self.top), strict=True):
            print(name)
            for label, probability in found:
                print(f"  {probability:6.1%}  {label}")
        return 0


@torch.inference_mode()
def classify(loaded: ImageModel, files: Sequence[str | Path], *, top: int = 5) -> Iterator[list[tuple[str, float]]]:
    """For each file the `top` likeliest classes and their probabilities, the likeliest first.

    Raises FileNotFoundError or ValueError (one line) for what gives no picture.
    """
    for start in range(0, len(files), _BATCH):
        pictures = read_pictures(files[start : start + _BATCH], loaded.inputs)
        logits = loaded.model(pictures.to(loaded.device))
        shares, likeliest = logits.float().softmax(1).topk(min(top, len(loaded.classes)), dim=1)
        for values, numbers in zip(shares.tolist(), likeliest.tolist(), strict=True):
            yield [(loaded.classes[number], value) for number, value in zip(numbers, values, strict=True)]
