"""Makes the loader of prepared pictures, and says what is known about them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

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

    info: ImagesInfo
    """What the manifest says of the training dataset."""
    mean: tuple[float, ...]
    """Subtracted from each channel."""
    std: tuple[float, ...]
    """Divided by."""

    bytes_per_target = None
    token_histogram = None
    tokenizer = None
    vocab_size = 0

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in the order of the labels."""
        return self.info.classes


def image_facts(data: DataConfig) -> ImageFacts:
    """What is known of the pictures of `data.images.path`, from its manifest alone.

    Raises FileNotFoundError or ValueError (one line) where there is no dataset of pictures.
    """
    config = data.images
    if not config.path:
        raise ValueError("no pictures given: set data.images.path to a folder made by `matmix prepare-images`")
    if (info := Storage(config.path, data.cache_dir).manifest.images) is None:
        raise ValueError(f"{config.path} holds text, not pictures; make one with `matmix prepare-images`")
    which = slice(0, 3) if config.channels == 3 else slice(3, 4)
    # A channel that is the same everywhere has no spread to divide by.
    spread = tuple(value or 1.0 for value in info.std[which])
    return ImageFacts(info=info, mean=config.mean or info.mean[which], std=config.std or spread)


def build_image_loader(
    data: DataConfig,
    *,
    split: str = "train",
    global_batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    one_pass: bool = False,
    tokenizer_sha256: str | None = None,
) -> Loader:
    """As `build_loader`, for `data.images`; a sample is a picture, and there is no tokenizer.

    Raises FileNotFoundError or ValueError (one line) for datasets that are missing or damaged, or do not fit together.
    """
    check_batch_sizes(global_batch_size, micro_batch_size, world_size)
    assert 0 <= rank < world_size
    config, facts = data.images, image_facts(data)
    path = config.validation_path if split == "validation" and config.validation_path else config.path
    shards = open_pictures(
        path,
        split,
        cache_dir=data.cache_dir,
        verify=data.verify,
        keep_open=2 * data.shuffle_block + 2,
        skip_damaged=data.skip_damaged,
        cache_bytes=data.cache_bytes,
    )
    if shards.manifest.images.classes != facts.classes:
        raise ValueError(f"{path} has other classes than {config.path}; prepare both with the same --classes")
    shuffle = data.shuffle and not one_pass
    rows = ImageRows(
        shards,
        config,
        facts.mean,
        facts.std,
        seed=seed,
        shuffle=shuffle,
        shuffle_block=data.shuffle_block,
        global_batch=global_batch_size,
        one_pass=one_pass,
    )
    if not rows.samples_per_epoch:
        raise ValueError(f"the {split} split of {path} holds no pictures")
    # What is wrong with the options is said now, and not by a reading process.
    make_transform(config, facts.mean, facts.std, training=not one_pass)
    content = [[s.documents, s.tokens, s.sha256] for s in shards.info.shards]
    fingerprint = {
        "data": [hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]],
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
        rank=rank,
        world_size=world_size,
    )
