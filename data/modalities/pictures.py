"""Pictures: prepared datasets of encoded pictures with a class each, read by `matmix.data.images.rows`."""

import dataclasses
import functools
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from matmix.data.config import DataConfig, datasets_of
from matmix.data.foreign.finding import is_foreign
from matmix.data.foreign.opening import images_info, not_promised, open_pictures
from matmix.data.loading.rows import Facts
from matmix.data.manifest import ImagesInfo, Manifest, SplitInfo
from matmix.data.modalities.base import Modality, Opened, Reading, contents_digest, shard_options, streams
from matmix.data.prepare.pictures import PrepareImagesConfig
from matmix.data.splits.reader import open_split
from matmix.data.storage.storage import Storage


class PictureFacts(Facts):
    """Facts about prepared pictures, from the manifests of their datasets."""

    inputs = "images"

    def __init__(self, data: DataConfig, infos: Sequence[ImagesInfo]) -> None:
        config = data.images
        mean, std = _pixels(infos, list(config.datasets.values()), config.channels)
        self.classes, self.background = infos[0].classes, infos[0].background
        self.mean, self.std = config.mean or mean, config.std or std
        self.outputs = len(self.classes)
        shown = f"{', '.join(self.classes[:10])}{', ...' if self.outputs > 10 else ''}"
        self.outputs_words = f"{', '.join(config.datasets)} has {self.outputs} classes ({shown})"

    def fill(self, data: DataConfig) -> DataConfig:
        images = data.images
        if images.classes and images.classes != self.classes:
            named = ", ".join(images.datasets)
            raise ValueError(f"data.images.classes are not those of {named}; leave them out, or prepare it again")
        if images.background not in (None, self.background):
            raise ValueError(
                f"data.images.background = {images.background}, but the pictures were prepared with {self.background}; "
                "leave it out, or prepare them again"
            )
        pixels = {"mean": tuple(self.mean), "std": tuple(self.std), "background": self.background}
        images = dataclasses.replace(images, classes=self.classes, **pixels)
        return dataclasses.replace(data, images=images)


class Pictures(Modality):
    """Each sample is a picture, which has no positions of its own."""

    unit = "images"
    prepared_by = PrepareImagesConfig
    agreeing = MappingProxyType({"images.size": "image.size", "images.channels": "image.channels"})

    def datasets(self, data: DataConfig, split: str = "train") -> dict[str, float]:
        return datasets_of(data.images, split)

    def packing(self, data: DataConfig) -> str:
        return "rows"

    def units(self, seqlen: int) -> int:
        return 1

    def split_words(self, split: SplitInfo) -> str:
        return f"{split.documents:,} pictures"

    def manifest_facts(self, data: DataConfig, manifests: Sequence[Manifest]) -> Facts:
        infos = [manifest.images for manifest in manifests if manifest.images is not None]
        return PictureFacts(data, infos) if len(infos) == len(manifests) else Facts()

    def facts(self, data: DataConfig) -> PictureFacts:
        """Returns facts from the manifests. Raises FileNotFoundError or ValueError (one line) where there is no dataset
        of pictures, or they have other classes."""
        paths = self.datasets(data)
        if not paths:
            raise ValueError("no pictures given: set data.images.path to a folder made by `matmix prepare-images`")
        infos = []
        if is_foreign(data.images.path, data.reader):
            facts = PictureFacts(data, [images_info(data)])
            facts.not_promised = not_promised(data, data.images.path)
            return facts
        for path in paths:
            infos.append(_images(path, Storage(path, data.cache_dir).manifest))
            _check_classes(path, infos[-1].classes, infos[0].classes, next(iter(paths)))
        return PictureFacts(data, infos)

    def class_names(self, data: DataConfig) -> tuple[str, ...]:
        return data.images.classes or self.facts(data).classes

    def open(self, data: DataConfig, reading: Reading) -> Opened:
        from matmix.data.images.rows import ImageRows
        from matmix.data.images.transforms import make_transform

        config, facts, sources = data.images, self.facts(data), self.datasets(data, reading.split)
        if is_foreign(path := next(iter(sources)), data.reader):
            return open_pictures(data, path, reading, facts)
        shards = [open_split(path, reading.split, **shard_options(data)) for path in sources]
        for path, one in zip(sources, shards, strict=True):
            _check_classes(path, _images(path, one.manifest).classes, facts.classes, next(iter(config.datasets)))
        make = functools.partial(make_transform, config, facts.mean, facts.std, training=not reading.one_pass)
        read, reader = streams(shards, data, reading)
        rows = ImageRows(read, data, reading, make)
        for one, size in zip(read, rows.sizes, strict=True):
            if not size:
                raise ValueError(f"the {reading.split} split of {one.storage.path} holds no pictures")
        make()  # what is wrong with the options is said now, and not by a reading process
        facts.class_counts = np.sum([one.manifest.images.counts[one.split] for one in shards], axis=0)
        fingerprint = {
            "data": [contents_digest(one) for one in shards],
            **({"weights": list(sources.values())} if len(sources) > 1 else {}),
            "classes": list(facts.classes),
            "split": reading.split,
            "shuffle": reading.shuffles(data),
            "shuffle_block": data.shuffle_block,
            "repeats": config.repeats,
            **reader,
            "seed": reading.seed,
            "objective": "images",
        }
        return Opened(rows, facts, fingerprint)


def _images(path: str, manifest: Manifest) -> ImagesInfo:
    if manifest.images is None:
        raise ValueError(f"{path} holds text, not pictures; make one with `matmix prepare-images`")
    return manifest.images


def _check_classes(path: str, theirs: tuple[str, ...], classes: tuple[str, ...], first: str) -> None:
    if theirs != classes:
        raise ValueError(f"{path} has other classes than {first}; prepare both with the same --classes")


def _pixels(infos: Sequence[ImagesInfo], weights: list[float], channels: int) -> tuple[tuple[float, ...], ...]:
    """Returns mean and spread of each channel; of several datasets those of the mixture with their weights."""
    which = slice(0, 3) if channels == 3 else slice(3, 4)
    mean, std = infos[0].mean[which], infos[0].std[which]
    if len(infos) > 1:
        shares = np.array(weights)[:, None] / sum(weights)
        means, spreads = (np.array([getattr(info, name)[which] for info in infos]) for name in ("mean", "std"))
        mixed = (shares * means).sum(0)
        squares = (shares * (spreads**2 + means**2)).sum(0)
        statistics = (mixed, np.sqrt(np.maximum(squares - mixed**2, 0.0)))
        mean, std = (tuple(round(float(value), 6) for value in values) for values in statistics)
    # A channel that is the same everywhere has no spread to divide by.
    return mean, tuple(value or 1.0 for value in std)
