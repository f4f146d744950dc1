"""Opens the directories of others as splits: what is known of them beforehand, and their rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from matmix.data.config import DataConfig
from matmix.data.foreign.finding import open_shards
from matmix.data.foreign.shards import Shards
from matmix.data.loading.rows import WHOLE, Facts, Opened, Reading
from matmix.data.manifest import ImagesInfo

if TYPE_CHECKING:
    from matmix.data.loading.masking import MaskingConfig

# Of ImageNet: red, green, blue, and brightness.
_MEAN, _STD = (0.485, 0.456, 0.406, 0.459), (0.229, 0.224, 0.225, 0.226)


class ForeignFacts(Facts):
    """Facts about text that is not prepared. Raises FileNotFoundError, ValueError (one line) where there is no
    tokenizer."""

    def __init__(self, data: DataConfig, path: str) -> None:
        from matmix.data.foreign_tokenizer import local_or_hub
        from matmix.data.tokenizer import Tokenizer

        if not data.tokenizer:
            raise ValueError(
                f"{path} has no manifest.json, so it is read as others made it: set data.tokenizer, or make a dataset "
                "of it with `matmix prepare`"
            )
        self.tokenizer = Tokenizer.load(local_or_hub(data.tokenizer))
        self.vocab_size = self.tokenizer.vocab_size
        self.not_promised = not_promised(data, path)


def not_promised(data: DataConfig, path: str) -> str:
    """Returns the line that says what does not hold of data which is read in this way."""
    first = f"the first {data.validation_samples:,}" if data.validation_samples else "all"
    return (
        f"{path} is read as it is (data.reader = {data.reader!r}): its order depends on the numbers of ranks and "
        "reading processes and the sizes of batches, and no run goes on with others; epochs, counts of tokens and "
        f"bits per byte are not known; of such validation data {first} samples are read"
    )


def open_text(data: DataConfig, path: str, reading: Reading, masking: MaskingConfig | None) -> Opened:
    """Opens a split of texts, on all ranks together. Raises as `Modality.open`."""
    from matmix.data.foreign.rows import ForeignText

    for given, name in (
        (reading.part != WHOLE, "engine.context"),
        (data.reverse_complement, "data.reverse_complement"),
    ):
        if given:
            raise ValueError(f"{path} is not prepared, and {name} needs prepared data: make it with `matmix prepare`")
    facts = ForeignFacts(data, path)
    if reading.tokenizer_sha256 not in (None, facts.tokenizer.sha256):
        raise ValueError(f"data.tokenizer = {data.tokenizer!r} is not the tokenizer of this run; put that one back")
    shards = open_shards(data, path, reading.split)
    own = {
        "tokenizer": facts.tokenizer.sha256,
        **{name: getattr(data, name) for name in ("seqlen", "packing", "prefix", "suffix", "text_field")},
        "objective": "causal" if masking is None else "masked",
    }
    fingerprint = _fingerprint(data, shards, reading, own)
    return Opened(ForeignText(shards, facts.tokenizer, data, reading, masking), facts, fingerprint)


def images_info(data: DataConfig) -> ImagesInfo:
    """Returns what the config says of pictures that are not prepared. Raises ValueError (one line) where it does not
    say which classes there are."""
    images = data.images
    classes = images.classes or tuple(str(number) for number in range(images.class_count))
    if not classes or (images.class_count and len(classes) != images.class_count):
        raise ValueError(
            f"{images.path} has no manifest.json, so it is read as others made it: set data.images.class_count to the "
            "number of its classes, or data.images.classes to their names"
        )
    return ImagesInfo(
        classes=classes, counts={}, mean=_MEAN, std=_STD, width=(0, 0.0, 0), height=(0, 0.0, 0), background=255
    )


def open_pictures(data: DataConfig, path: str, reading: Reading, facts: Any) -> Opened:
    """Opens a split of pictures, on all ranks together. facts: `PictureFacts`. Raises as `Modality.open`."""
    import numpy as np

    from matmix.data.foreign.rows import ForeignPictures
    from matmix.data.images.transforms import make_transform

    make = functools.partial(make_transform, data.images, facts.mean, facts.std, training=not reading.one_pass)
    make()  # what is wrong with the options is said now, and not by a reading process
    shards = open_shards(data, path, reading.split)
    own = {"classes": list(facts.classes), "objective": "images"}
    fingerprint = _fingerprint(data, shards, reading, own)
    rows = ForeignPictures(shards, data, reading, len(facts.classes), make)
    if reading.one_pass:
        facts.class_counts = np.bincount([label for _, _, label in rows.kept], minlength=len(facts.classes))
    return Opened(rows, facts, fingerprint)


def _fingerprint(data: DataConfig, shards: Shards, reading: Reading, own: dict[str, Any]) -> dict[str, Any]:
    """Returns the data that a saved position belongs to. Raises ValueError (one line) for more streams than shards."""
    streams = reading.streams(data)
    if not reading.one_pass and len(shards.names) < streams:
        raise ValueError(
            f'data.reader = "{data.reader}" gives each of {streams} reading processes shards of its own, but '
            f"{shards.path} has {len(shards.names)}; take fewer data.workers"
        )
    return {
        "data": [shards.digest],
        **own,
        "split": reading.split,
        "shuffle": reading.shuffles(data),
        "seed": reading.seed,
        "reader": reading.reader(data),
    }
