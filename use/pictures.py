"""Classifies pictures with an image classifier, and scores it on prepared ones."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from matmix.data.config import DataConfig, ImagesConfig
from matmix.data.images.decode import UnreadablePicture, decode
from matmix.data.images.transforms import make_transform
from matmix.data.modalities import MODALITIES
from matmix.model.images.config import ImageInputs
from matmix.model.interop.importing.exported import read_labels
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.image_classification import ImageClassification, image_controls
from matmix.train.tasks.metrics import as_controls
from matmix.use.opening import TrainedModel
from matmix.use.scoring import one_pass

_BATCH = 64
_KEPT = 5
"""Likeliest classes that are kept of each picture."""


@torch.inference_mode()
def classify(opened: TrainedModel, files: Sequence[str | Path], *, top: int = 5) -> Iterator[list[tuple[str, float]]]:
    """Yields for each file the `top` likeliest classes and their probabilities, the likeliest first. Raises
    FileNotFoundError or ValueError (one line) for a model that is no image classifier, and as `read_pictures` does."""
    inputs, classes = opened.image_inputs, opened.classes
    for start in range(0, len(files), _BATCH):
        pictures = read_pictures(files[start : start + _BATCH], inputs)
        logits = opened.model(pictures.to(opened.device))
        shares, likeliest = logits.float().softmax(1).topk(min(top, len(classes)), dim=1)
        for values, numbers in zip(shares.tolist(), likeliest.tolist(), strict=True):
            yield [(classes[number], value) for number, value in zip(numbers, values, strict=True)]


def read_pictures(files: Sequence[str | Path], inputs: ImageInputs) -> Tensor:
    """Reads the pictures in files, as `decode` describes, as the evaluation of the training does: float32
    (n, channels, size, size). Raises FileNotFoundError or ValueError (one line) for a file that gives no picture."""
    channels, pictures = len(inputs.mean), []
    images = ImagesConfig(size=inputs.size, channels=channels, crop=inputs.crop, interpolation=inputs.interpolation)
    transform = make_transform(images, inputs.mean, inputs.std, training=False)
    for file in map(Path, files):
        if file.is_dir():
            raise ValueError(f"{file} is a folder; name the pictures in it, such as {file}/*.png")
        if not file.is_file():
            raise FileNotFoundError(f"there is no picture at {file}")
        try:
            pictures.append(transform(decode(file.read_bytes(), channels=channels, background=inputs.background)))
        except UnreadablePicture as error:
            raise ValueError(f"{file} gives no picture: {error}") from None
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    return torch.stack(pictures)


@dataclasses.dataclass(frozen=True, slots=True)
class ImageScores:
    """The predictions of a classifier for the n pictures of a split."""

    where: str
    """What the classifier is from, for people."""
    pictures: str
    """Which pictures they are, for people."""
    classes: tuple[str, ...]
    loss: float
    """nats per image"""
    numbers: np.ndarray
    """int64 (n,): of the pictures in their split"""
    labels: np.ndarray
    """int64 (n,)"""
    likeliest: np.ndarray
    """int64 (n, k): the k likeliest classes, the likeliest first; k is 5, or as many as there are"""
    probabilities: np.ndarray
    """float32 (n, k): theirs"""

    def metrics(self) -> dict[str, float]:
        """Returns the loss, and the shares of pictures whose class is the likeliest or among the five likeliest."""
        right = self.likeliest == self.labels[:, None]
        return {"loss": self.loss, "accuracy": float(right[:, 0].mean()), "top5": float(right.any(1).mean())}

    def controls(self) -> dict[str, float]:
        """Returns the scores of the most frequent classes as the answer to all pictures, by their names in records."""
        return as_controls(image_controls(np.bincount(self.labels, minlength=len(self.classes))))

    def by_class(self) -> list[dict[str, Any]]:
        """Returns for each class with pictures its name, their number, the share that is recognised, the class that the
        others are most often taken for (None where there are no others), and how often."""
        rows = []
        for number, name in enumerate(self.classes):
            counts = np.bincount(self.likeliest[self.labels == number, 0], minlength=len(self.classes))
            if not (images := int(counts.sum())):
                continue
            right, counts[number] = int(counts[number]), 0
            most = int(counts.argmax())
            taken_for = self.classes[most] if counts[most] else None
            row = {"class": name, "images": images, "accuracy": right / images}
            rows.append({**row, "taken_for": taken_for, "times": int(counts[most])})
        return rows

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a JSON object for each picture: its number in the split, from 0 on, its class, and the likeliest."""
        for number, label, best, shares in zip(
            self.numbers.tolist(), self.labels.tolist(), self.likeliest, self.probabilities, strict=True
        ):
            values = {self.classes[int(one)]: round(float(share), 6) for one, share in zip(best, shares, strict=True)}
            names = {"predicted": self.classes[int(best[0])], "label": self.classes[label]}
            yield {"example": number, **names, "values": values}


def classifies_images(opened: TrainedModel) -> bool:
    """Says whether a model is a run that was trained on classes of images, or an export of one."""
    if opened.run is not None:
        return isinstance(opened.run.config.task(), ImageClassification)
    return opened.config.architecture in ImageClassification.architectures


@torch.inference_mode()
def score_images(opened: TrainedModel, dataset: str = "", *, split: str = "validation") -> ImageScores:
    """Scores an image classifier on a split of a dataset that `matmix prepare-images` made; "" = the run's own. Raises
    FileNotFoundError or ValueError (one line)."""
    inputs, classes, seed = opened.image_inputs, opened.classes, 0
    if opened.run is not None:
        data, seed = opened.run.config.data, opened.run.config.seed
    else:
        named = classes if read_labels(opened.path) else ()
        channels = opened.config.image.channels
        data = DataConfig(images=ImagesConfig(**dataclasses.asdict(inputs), channels=channels, classes=named))
    if not (dataset or data.images.datasets):
        raise ValueError(
            f"{opened.name} is an export, which knows no pictures: name a dataset of matmix prepare-images"
        )
    data = _with_dataset(data, dataset) if dataset else data
    task = ImageClassification(ObjectiveConfig(name="image_classification"))
    loader = one_pass(task, data, split, seed, _BATCH)
    classes, outputs = data.images.classes or tuple(loader.facts.classes), opened.config.head.count
    if len(classes) != outputs:
        raise ValueError(f"{opened.name} tells {outputs} classes apart, and {data.images.named} has {len(classes)}")
    parts, losses = [], 0.0
    for batch in tqdm(loader, desc="scoring", unit="batch", leave=False, disable=None):
        costs = task.costs(opened.model, batch.to(opened.device))
        losses += costs.loss.sum(dtype=torch.float64).item()
        assert costs.predicted is not None
        shares, likeliest = costs.predicted.values.topk(min(_KEPT, len(classes)), dim=1)
        kept = batch.examples >= 0  # the others fill up the last batch
        columns = (batch.examples, batch.labels, likeliest.cpu(), shares.cpu())
        parts.append([values[kept].numpy() for values in columns])
    numbers, labels, likeliest, probabilities = (np.concatenate(values) for values in zip(*parts, strict=True))
    pictures, loss = f"{data.images.named}, {split} split", losses / len(labels)
    return ImageScores(opened.where, pictures, classes, loss, numbers, labels, likeliest, probabilities)


def _with_dataset(data: DataConfig, dataset: str) -> DataConfig:
    """Returns `data` with another dataset of the same classes, normalised as the one that the model was trained on."""
    images = data.images
    other = dataclasses.replace(data, images=dataclasses.replace(images, path=dataset, mixture={}, validation_path=""))
    classes = MODALITIES["pictures"].facts(other).classes
    if images.classes and classes != images.classes:
        named = next((name for name in classes if name not in images.classes), classes[0] if classes else "none")
        raise ValueError(
            f"{dataset} has other classes than the model ({len(classes)} and {len(images.classes)}, {named!a} for "
            "example); prepare it with the same --classes"
        )
    return other
