"""`matmix classify RUN IMAGE ...`: the likeliest classes of pictures, by the image classifier of a run or an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from matmix.train.arguments import RunFolder
from matmix.train.state import Weights


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
        """Prints the classes and returns the exit code. Raises FileNotFoundError or ValueError (one line)."""
        from matmix.use.opening import open_model
        from matmix.use.pictures import classify

        if not self.images:
            raise ValueError("name the pictures: matmix classify RUN IMAGE ...")
        if self.top < 1:
            raise ValueError(f"--top must be 1 or more, got {self.top}")
        opened = open_model(self.source, step=self.step, weights=self.weights)
        likeliest = classify(opened, self.images, top=self.top)
        missing = next((name for name in self.images if not Path(name).exists()), None)
        if missing is not None:
            raise FileNotFoundError(f"there is no picture at {missing}")
        print(f"{opened.where}: {len(opened.classes):,} classes")
        for name, classes in zip(self.images, likeliest, strict=True):
            print(name)
            for label, probability in classes:
                print(f"  {probability:6.1%}  {label}")
        return 0
