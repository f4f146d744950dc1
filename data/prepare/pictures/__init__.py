"""Options of `matmix prepare-images`: from files of pictures with labels to shards of pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from matmix.data.artifacts import from_extra
from matmix.data.config import Limits, at_least
from matmix.data.prepare.base import Preparation, PrepareOptions


@dataclass(frozen=True, kw_only=True)
class PrepareImagesConfig(PrepareOptions):
    """Files of pictures to shards."""

    verb: ClassVar[str] = "matmix prepare-images"
    without_effect: ClassVar[Sequence[str]] = (*PrepareOptions.without_effect, "validation", "labels", "classes")

    validation: tuple[str, ...] = ()
    """Inputs whose pictures are the validation split, in place of a share of the others."""
    validation_fraction: float = 0.0
    compression: Literal["zstd", "none"] = "none"
    """Compression of the shards; pictures are compressed already."""
    labels: str = ""
    """Table of the labels of a folder or .tar of pictures: a .csv or .tsv file with a header, or a .json object of file
    name -> label or object. A name without a folder may be that of a file in the folder or .tar itself."""
    image_field: str = "image"
    """Column of .parquet files, or of the table, that holds the picture or names its file."""
    label_field: str = "label"
    """Column of .parquet files or of the table, or field of the .json members of .tar files, that holds the label."""
    classes: str = ""
    """File with the names of the classes, one a line, in the order of the labels. Empty: names of folders, those that a
    .parquet file states, or the labels found, sorted."""

    short_side: int = 0
    """Make pictures smaller until their short side has so many pixels; smaller ones stay as they are. 0: never."""
    encoding: Literal["keep", "jpeg", "png", "webp"] = "keep"
    """How pictures are stored. keep: files as they are, made smaller ones as JPEG where they were JPEG and as PNG
    otherwise."""
    quality: int = 90
    """Quality of pictures that are encoded anew as JPEG or WebP, 1 to 100."""
    background: int = 255
    """Brightness behind transparent pixels, from 0 (black) to 255 (white)."""
    max_megapixels: float = 100.0
    """Larger pictures count as corrupt. It bounds the memory that a small file can ask for."""
    max_corrupt: float = 0.01
    """Share of the pictures that may be corrupt; they are left out, counted and named."""

    def limits(self) -> Limits:
        return [
            *at_least(self, short_side=0),
            ("quality", 1 <= self.quality <= 100, "in [1, 100]"),
            ("background", 0 <= self.background <= 255, "in [0, 255]"),
            ("max_megapixels", self.max_megapixels > 0, "above 0"),
            ("max_corrupt", 0 <= self.max_corrupt <= 1, "in [0, 1]"),
            *super().limits(),
        ]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation and self.validation_fraction:
            raise ValueError("prepare-images: validation and validation_fraction are both given: keep one of them")

    @classmethod
    def kind(cls) -> type[Preparation]:
        with from_extra("vision", "pictures need Pillow"):
            from matmix.data.prepare.pictures.preparation import PicturePreparation
        return PicturePreparation
