"""`python -P docs/examples/image_baselines.py DATASET`: what simple models make of labelled pictures, to stand
beside image classifiers: the most frequent class, and logistic regression on pixels.

DATASET is made by `matmix prepare-images`; they learn from its training split and are scored on the validation split.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import tyro
from sklearn.linear_model import LogisticRegression

from matmix.data.config import DataConfig, ImagesConfig
from matmix.data.modalities import build_loader
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baselines:
    """What simple models make of labelled pictures."""

    dataset: tyro.conf.Positional[str]
    """A folder made by `matmix prepare-images`."""
    size: int = 28
    """Height and width that pictures are brought to, in pixels."""
    strength: float = 0.01
    """C of the logistic regression: smaller = weights are kept smaller."""

    def run(self) -> int:
        """Prints accuracies; the exit code."""
        (x, y), (held_out, labels) = (pixels(self.dataset, split, self.size) for split in ("train", "validation"))
        most = np.bincount(y).argmax()
        model = LogisticRegression(C=self.strength, max_iter=1000).fit(x, y)
        for name, right in (("most frequent class", labels == most), ("pixels", labels == model.predict(held_out))):
            print(f"{name:<30} accuracy {right.mean():6.2%} of {len(labels):,} pictures", flush=True)
        return 0


def pixels(dataset: str, split: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Brightness of the pixels of all pictures of a split, normalised, float32 (N, size * size), and their classes,
    int64 (N,). Raises as `build_loader`."""
    images = ImagesConfig(path=dataset, size=size, channels=1, crop=1.0, interpolation="bilinear")
    data = DataConfig(images=images, workers=0)
    loader = build_loader(data, split=split, global_batch_size=64, micro_batch_size=64, one_pass=True)
    found, labels = [], []
    for batch in loader:
        there = batch.labels >= 0
        found.append(batch.inputs[there].flatten(1).numpy())
        labels.append(batch.labels[there].numpy())
    loader.close()
    return np.concatenate(found), np.concatenate(labels)


def main(arguments: list[str]) -> int:
    """Scores the baselines and returns the exit code."""
    prog = "python -P docs/examples/image_baselines.py"
    return guarded(lambda: parse_arguments(Baselines, arguments, prog=prog).run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
