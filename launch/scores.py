"""Prints the scores of `matmix evaluate`, and writes them into files."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matmix.data.storage.files import write_atomic
from matmix.launch.figures import MOST_CLASSES, confusion_picture
from matmix.train.tasks.finetuning.base import with_labels
from matmix.train.tasks.image_classification import ImageClassification
from matmix.train.tasks.metrics import control_lines
from matmix.use.pictures import ImageScores
from matmix.use.scoring import ExampleScores, Score

_SHOWN = 10
"""Classes that are shown of many: those that are recognised least."""


def check_files(**files: Path | None) -> None:
    """Raises ValueError (one line) for a file, by its option, that cannot be written: before the work, not after it."""
    for option, path in files.items():
        if path is None:
            continue
        above = next(folder for folder in path.absolute().parents if folder.exists())
        if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
            where = f"{path} is a folder" if path.is_dir() else f"{above} is no folder that can be written to"
            raise ValueError(f"--{option} {path} cannot be written: {where}")


def say_texts(where: str, score: Score, xz_bits_per_byte: float, out: Path | None) -> None:
    """Prints the scores of a language model, and writes them into `out` (.json)."""
    print(f"{where}: {score.texts:,} documents, {score.tokens:,} tokens, {score.bytes:,} bytes; {score.method}")
    rows = {
        "loss": (score.nats / score.tokens, "nats per token"),
        "perplexity": (score.perplexity, "per token"),
        "word_perplexity": (score.word_perplexity, "per word (what stands between white space)"),
        "bits_per_byte": (score.bits_per_byte, "bits per byte"),
        "xz_bits_per_byte": (xz_bits_per_byte, "bits per byte by `xz -9` of the same text, for comparison"),
    }
    for name, (value, unit) in rows.items():
        print(f"  {name.replace('_', ' '):<18}{value:>12.4f}  {unit}")
    if out is not None:
        numbers = {name: value for name, (value, _) in rows.items()}
        counts = {"documents": score.texts, "tokens": score.tokens, "bytes": score.bytes, "words": score.words}
        _save(out, json.dumps({**numbers, **counts, "method": score.method}, indent=2) + "\n")


def say_examples(scores: ExampleScores, **files: Path | None) -> None:
    """Prints the metrics, and writes the files that are named: out, the metrics (.json), predictions (.jsonl), and
    confusion, a picture (.png). Raises ValueError for one where there are no classes, no labels, or too many."""
    metrics, controls = scores.metrics(), scores.controls()
    known = {metric.name: metric for metric in scores.task.metrics}
    if files["confusion"] is not None and (not scores.classes or not metrics or len(scores.classes) > MOST_CLASSES):
        most = f"at most {MOST_CLASSES} of them"
        raise ValueError(f"--confusion draws one class for each example, {most}, against its label")
    print(f"{scores.where}: {len(scores.examples.rows):,} examples in {scores.examples.config.test}")
    for name, value in metrics.items():
        title = known[name].title if name in known else name.replace("_", " ")
        print(f"  {title:<28}{known[name].number(value) if name in known else f'{value:.4f}':>12}")
    for line in control_lines(scores.task.metrics, metrics | controls):
        print(f"  {line}")
    if not metrics:
        print("  no example has a label, so there is nothing to score")
    values, labels = with_labels(scores.predicted)
    title = f"{scores.where}\n{len(labels):,} examples of {scores.examples.config.test}"
    numbers = {**metrics, **controls, "examples": len(scores.examples.rows)}
    _write(files, numbers, scores.rows(), lambda: (labels, values.argmax(1), scores.classes, title))


def say_images(scores: ImageScores, **files: Path | None) -> None:
    """Prints the scores, and writes the files that are named, as `say_examples`: out holds those of the classes, too.
    Raises ValueError for a picture of too many classes."""
    if files["confusion"] is not None and len(scores.classes) > MOST_CLASSES:
        raise ValueError(f"--confusion draws at most {MOST_CLASSES} classes, and there are {len(scores.classes)}")
    metrics, classes = scores.metrics() | scores.controls(), scores.by_class()
    images = f"{len(scores.labels):,} images of {scores.pictures}"
    print(f"{scores.where}: {images}")
    for metric in (ImageClassification.loss_metric, *ImageClassification.metrics):
        print(f"  {metric.title:<28}{metric.number(metrics[metric.name])}")
    for line in control_lines(ImageClassification.metrics, metrics):
        print(f"  {line}")
    if len(classes) > 1:
        mean = sum(row["accuracy"] for row in classes) / len(classes)
        print(f"  {'mean over the classes':<28}{mean:.2%}")
    print(f"{'The classes' if len(classes) <= _SHOWN else f'The {_SHOWN} classes that are recognised least'}:")
    for row in sorted(classes, key=lambda row: row["accuracy"])[:_SHOWN]:
        other = f"  most often taken for {row['taken_for']} ({row['times']:,})" if row["taken_for"] else ""
        print(f"  {row['class']:<28}{row['accuracy']:>8.2%} of {row['images']:,}{other}")
    numbers = {**metrics, "images": len(scores.labels), "classes": classes}
    drawn = scores.labels, scores.likeliest[:, 0], scores.classes, f"{scores.where}\n{images}"
    _write(files, numbers, scores.rows(), lambda: drawn)


def _write(files: Mapping[str, Path | None], numbers: Any, rows: Iterable[Any], drawn: Callable[[], tuple]) -> None:
    """Writes the files that are named. drawn: gives the arguments of `confusion_picture`."""
    if (out := files["out"]) is not None:
        _save(out, json.dumps(numbers, indent=2, ensure_ascii=False) + "\n")
    if (predictions := files["predictions"]) is not None:
        _save(predictions, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if (confusion := files["confusion"]) is not None:
        _save(confusion, confusion_picture(*drawn()))


def _save(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    print(f"Written: {path}")
