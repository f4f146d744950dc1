"""Scores of an image classifier on prepared pictures: top-1, top-5, each class, and what is taken for what."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from matmix.data.config import DataConfig
from matmix.data.loading.images import image_facts
from matmix.data.storage.files import write_atomic
from matmix.launch.figures import MOST_CLASSES, confusion_picture
from matmix.launch.images.classifiers import load_image_model
from matmix.model.interop.importing.exported import read_export_config
from matmix.model.interop.importing.foreign import read_object
from matmix.train.engine.full_state import Weights
from matmix.train.run.directory import RunDirectory
from matmix.train.run.remote import fetch_run
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.image_classification import ImageClassification, image_controls
from matmix.train.tasks.metrics import as_controls, control_lines

_BATCH = 64
_KEPT = 5
"""Likeliest classes that are kept of each picture."""
_SHOWN = 10
"""Classes that are shown of many, those that are recognised least."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageScores:
    """What a classifier makes of the n pictures of a split."""

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
        """Loss, and shares of pictures whose class is the likeliest or among the five likeliest."""
        right = self.likeliest == self.labels[:, None]
        return {"loss": self.loss, "accuracy": float(right[:, 0].mean()), "top5": float(right.any(1).mean())}

    def controls(self) -> dict[str, float]:
        """What the most frequent classes score as the answer to all pictures, by the names that records have for it."""
        return as_controls(image_controls(np.bincount(self.labels, minlength=len(self.classes))))

    def by_class(self) -> list[dict[str, Any]]:
        """Of each class that has pictures: its name, their number, the share that is recognised, and what the others
        are most often taken for (None where there are no others), and how often."""
        found = []
        for number, name in enumerate(self.classes):
            taken = self.likeliest[self.labels == number, 0]
            if not len(taken):
                continue
            counts = np.bincount(taken, minlength=len(self.classes))
            right, counts[number] = int(counts[number]), 0
            most = int(counts.argmax())
            for_other = self.classes[most] if counts[most] else None
            row = {"class": name, "images": len(taken), "accuracy": right / len(taken)}
            found.append({**row, "taken_for": for_other, "times": int(counts[most])})
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """A JSON object for each picture: its number in the split, from 0 on, its class, and the likeliest ones."""
        for number, label, found, shares in zip(
            self.numbers.tolist(), self.labels.tolist(), self.likeliest, self.probabilities, strict=True
        ):
            values = {self.classes[int(one)]: round(float(share), 6) for one, share in zip(found, shares, strict=True)}
            yield {"example": number, "predicted": self.classes[int(found[0])], "label": self.classes[label]} | {
                "values": values
            }


def classifies_images(source: str | Path) -> bool:
    """Whether `source` is a run that was trained on classes of images, or an export of one."""
    folder, _ = fetch_run(source, weights_only=True)
    if (folder / "config.toml").is_file():
        return isinstance(RunDirectory(folder).read_config().task(), ImageClassification)
    config = folder / "config.json"
    if not config.is_file() or "matmix" not in read_object(config):
        return False
    return read_export_config(folder).architecture in ImageClassification.architectures


@torch.inference_mode()
def score_images(
    source: str | Path,
    dataset: str = "",
    *,
    split: str = "validation",
    step: int | None = None,
    weights: Weights = "raw",
) -> ImageScores:
    """Scores a run, at its newest checkpoint or that of `step`, with its weights or their average, or an export, on a
    split of a dataset that `matmix prepare-images` made; "" = that of the run. Raises FileNotFoundError or ValueError
    (one line)."""
    by = load_image_model(source, step=step, weights=weights)
    if not (dataset or by.data.images.datasets):
        raise ValueError(f"{source} is an export, which knows no pictures: name a dataset of matmix prepare-images")
    data = _with_dataset(by.data, dataset) if dataset else by.data
    task = ImageClassification(ObjectiveConfig(name="image_classification"))
    options = {"global_batch_size": _BATCH, "micro_batch_size": _BATCH, "one_pass": True, "seed": by.seed}
    loader = task.make_loader(dataclasses.replace(data, workers=0), split=split, **options)
    classes, outputs = data.images.classes or tuple(loader.facts.classes), by.model.config.head.count
    if len(classes) != outputs:
        raise ValueError(f"{source} tells {outputs} classes apart, and {data.images.named} has {len(classes)}")
    parts, losses = [], 0.0
    for batch in tqdm(loader, desc="scoring", unit="batch", leave=False, disable=None):
        costs = task.costs(by.model, batch.to(by.device))
        losses += costs.loss.sum(dtype=torch.float64).item()
        assert costs.predicted is not None
        shares, likeliest = costs.predicted.values.topk(min(_KEPT, len(classes)), dim=1)
        kept = batch.examples >= 0  # the others fill up the last batch
        found = (batch.examples, batch.labels, likeliest.cpu(), shares.cpu())
        parts.append([values[kept].numpy() for values in found])
    numbers, labels, likeliest, probabilities = (np.concatenate(values) for values in zip(*parts, strict=True))
    return ImageScores(
        where=f"{by.source}, {by.state}",
        pictures=f"{data.images.named}, {split} split",
        classes=classes,
        loss=losses / len(labels),
        numbers=numbers,
        labels=labels,
        likeliest=likeliest,
        probabilities=probabilities,
    )


def _with_dataset(data: DataConfig, dataset: str) -> DataConfig:
    """The pictures of another dataset of the same classes, normalised as those that the model was trained on."""
    images = data.images
    other = dataclasses.replace(data, images=dataclasses.replace(images, path=dataset, mixture={}, validation_path=""))
    classes = tuple(image_facts(other).classes)
    if images.classes and classes != images.classes:
        named = next((name for name in classes if name not in images.classes), classes[0] if classes else "none")
        raise ValueError(
            f"{dataset} has other classes than the model ({len(classes)} and {len(images.classes)}, {named!a} for "
            "example); prepare it with the same --classes"
        )
    return other


def say_images(scores: ImageScores, *, out: Path | None, predictions: Path | None, confusion: Path | None) -> None:
    """Prints the scores, and writes the files that are named: all scores (.json), a JSON object for each picture
    (.jsonl), the confusion matrix (.png). Raises ValueError for a picture of too many classes."""
    if confusion is not None and len(scores.classes) > MOST_CLASSES:
        raise ValueError(f"--confusion draws at most {MOST_CLASSES} classes, and there are {len(scores.classes)}")
    metrics, classes = scores.metrics() | scores.controls(), scores.by_class()
    print(f"{scores.where}: {len(scores.labels):,} images of {scores.pictures}")
    for metric in (ImageClassification.loss_metric, *ImageClassification.metrics):
        print(f"  {metric.title:<28}{metric.number(metrics[metric.name])}")
    for line in control_lines(ImageClassification.metrics, metrics):
        print(f"  {line}")
    if len(classes) > 1:
        mean = sum(row["accuracy"] for row in classes) / len(classes)
        print(f"  {'mean over the classes':<28}{mean:.2%}")
    worst = sorted(classes, key=lambda row: row["accuracy"])[:_SHOWN]
    print(f"{'The classes' if len(classes) <= _SHOWN else f'The {_SHOWN} classes that are recognised least'}:")
    for row in worst:
        other = f"  most often taken for {row['taken_for']} ({row['times']:,})" if row["taken_for"] else ""
        print(f"  {row['class']:<28}{row['accuracy']:>8.2%} of {row['images']:,}{other}")
    if out is not None:
        values = {**metrics, "images": len(scores.labels), "classes": classes}
        write_atomic(out, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    if predictions is not None:
        write_atomic(predictions, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in scores.rows()))
    if confusion is not None:
        title = f"{scores.where}\n{len(scores.labels):,} images of {scores.pictures}"
        write_atomic(confusion, confusion_picture(scores.labels, scores.likeliest[:, 0], scores.classes, title))
