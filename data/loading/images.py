"""Makes the loader of prepared pictures, and says what is known about them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from matmix.data.config import DataConfig
from matmix.data.images.transforms import make_transform
from matmix.data.loading.image_rows import ImageRows
from matmix.data.loading.loader import Loader
from matmix.data.loading.loader_parts import check_batch_sizes
from matmix.data.manifest import ImagesInfo
from matmix.data.splits.reader import open_pictures
from matmix.data.storage.storage import Storage


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """Facts about prepared pictures."""

    classes: tuple[str, ...]
    """Names in the order of the labels."""
    mean: tuple[float, ...]
    """Subtracted from each channel."""
    std: tuple[float, ...]
    """Divided by."""

    bytes_per_target = None
    token_histogram = None
    tokenizer = None
    vocab_size = 0


def image_facts(data: DataConfig) -> ImageFacts:
    """What is known of the pictures of `data.images.path` or its mixture, from their manifests alone.

    Raises FileNotFoundError or ValueError (one line) where there is no dataset of pictures, or they have other classes.
    """
    config, infos = data.images, []
    if not config.datasets:
        raise ValueError("no pictures given: set data.images.path to a folder made by `matmix prepare-images`")
    for path in config.datasets:
        if (info := Storage(path, data.cache_dir).manifest.images) is None:
            raise ValueError(f"{path} holds text, not pictures; make one with `matmix prepare-images`")
        infos.append(info)
        _check_classes(path, info, infos[0].classes, next(iter(config.datasets)))
    mean, std = _pixels(infos, list(config.datasets.values()), config.channels)
    return ImageFacts(classes=infos[0].classes, mean=config.mean or mean, std=config.std or std)


def _check_classes(path: str, info: ImagesInfo, classes: tuple[str, ...], first: str) -> None:
    if info.classes != classes:
        raise ValueError(f"{path} has other classes than {first}; prepare both with the same --classes")


def _pixels(infos: list[ImagesInfo], weights: list[float], channels: int) -> tuple[tuple[float, ...], ...]:
    """Mean and spread of each channel; of several datasets those of the mixture, in which each counts by its weight."""
    which = slice(0, 3) if channels == 3 else slice(3, 4)
    mean, std = infos[0].mean[which], infos[0].std[which]
    if len(infos) > 1:
        shares = np.array(weights)[:, None] / sum(weights)
        means, spreads = (np.array([getattr(info, name)[which] for info in infos]) for name in ("mean", "std"))
        mixed = (shares * means).sum(0)
        squares = (shares * (spreads**2 + means**2)).sum(0)
        found = (mixed, np.sqrt(np.maximum(squares - mixed**2, 0.0)))
        mean, std = (tuple(round(float(value), 6) for value in values) for values in found)
    # A channel that is the same everywhere has no spread to divide by.
    return mean, tuple(value or 1.0 for value in std)


def build_image_loader(
    data: DataConfig,
    *,
    split: str = "train",
    global_batch_size: int,
    micro_batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    seed: int = 0,
    one_pass: bool = False,
    tokenizer_sha256: str | None = None,
) -> Loader:
    """As `build_loader`, for `data.images`; a sample is a picture, and there is no tokenizer.

    Raises FileNotFoundError or ValueError (one line) for datasets that are missing or damaged, or do not fit together.
    """
    check_batch_sizes(global_batch_size, micro_batch_size, data_size)
    assert 0 <= data_rank < data_size
    config, facts, sources = data.images, image_facts(data), data.images.datasets
    first = next(iter(sources))
    if split == "validation" and config.validation_path:
        sources = {config.validation_path: 1.0}
    shards = [
        open_pictures(
            path,
            split,
            cache_dir=data.cache_dir,
            verify=data.verify,
            keep_open=2 * data.shuffle_block + 2,
            skip_damaged=data.skip_damaged,
            cache_bytes=data.cache_bytes,
        )
        for path in sources
    ]
    for path, one in zip(sources, shards, strict=True):
        _check_classes(path, one.manifest.images, facts.classes, first)
    shuffle = data.shuffle and not one_pass
    rows = ImageRows(
        shards,
        list(sources.values()),
        config,
        facts.mean,
        facts.std,
        seed=seed,
        shuffle=shuffle,
        shuffle_block=data.shuffle_block,
        global_batch=global_batch_size,
        one_pass=one_pass,
    )
    if (empty := next((path for path, size in zip(sources, rows.sizes, strict=True) if not size), None)) is not None:
        raise ValueError(f"the {split} split of {empty} holds no pictures")
    # What is wrong with the options is said now, and not by a reading process.
    make_transform(config, facts.mean, facts.std, training=not one_pass)
    contents = [[[s.documents, s.tokens, s.sha256] for s in one.info.shards] for one in shards]
    fingerprint = {
        "data": [hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16] for content in contents],
        **({"weights": list(sources.values())} if len(sources) > 1 else {}),
        "classes": list(facts.classes),
        "split": split,
        "shuffle": shuffle,
        "shuffle_block": data.shuffle_block,
        "repeats": config.repeats,
        "seed": seed,
        "objective": "images",
    }
    return Loader(
        rows,
        facts,
        data,
        fingerprint=fingerprint,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_rank=data_rank,
        data_size=data_size,
    )
