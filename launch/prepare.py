"""`matmix prepare INPUT ... --out DIR [--option value ...]`, and `matmix prepare --merge --out DIR`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import tyro
from tyro.constructors import StructFieldSpec

from matmix.data.prepare.command import prepare, prepare_tokenizer
from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.merge import merge
from matmix.data.prepare.upload import prepare_to_url
from matmix.data.storage.remote import is_url
from matmix.launch.merging import check_merge
from matmix.train.arguments import Options
from matmix.train.process.console import report

_USAGE = "matmix prepare INPUT ... --out DIR"
_MERGE_USAGE = "matmix prepare --merge --out DIR"


class PrepareOptions(Options):
    """How text becomes shards."""

    described: ClassVar[type] = PrepareConfig

    @classmethod
    def option(cls, field: StructFieldSpec) -> StructFieldSpec | None:
        """Fields of the verb itself are left out; True and False are written out."""
        if field.name in ("inputs", "out", "tokenizer_only"):
            return None
        return dataclasses.replace(field, type=tyro.conf.FlagConversionOff[field.type])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenise text into shards. The same command again goes on where it was stopped.

    Parts of a large input can be made on several machines (--part 3/64); --merge joins them.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="INPUT ...")] = ()
    """Files (.txt; .jsonl, .ndjson or .json with one object a line; also .gz .xz .zst; .parquet), folders, globs, or
    bundled:shakespeare, bundled:moby_dick."""
    out: str = ""
    """Folder or URL (s3://, ...) for the dataset. An unfinished one of the same options is continued, any other is
    left alone."""
    tokenizer_only: bool = False
    """Only make the tokenizer that all parts share."""
    merge: bool = False
    """Join the parts in --out, which know their input, into one dataset."""
    dry_run: bool = False
    """With --merge: only show the state of the parts, and check those that are finished."""
    options: tyro.conf.OmitArgPrefixes[PrepareOptions]

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prepares or joins; the exit code. Raises ValueError (one line) for the user's mistakes."""
        if self.merge:
            return self._merge()
        if self.dry_run:
            raise ValueError(f"--dry-run shows the parts that a merge would join: {_MERGE_USAGE} --dry-run")
        config = self.config()
        if is_url(config.out) and (config.part or config.tokenizer_only):
            raise ValueError(f"parts are made in a folder that all machines share, not at a URL such as {config.out}")
        try:
            if config.tokenizer_only:
                tokenizer = prepare_tokenizer(config)
                print(f"tokenizer of all parts: {tokenizer.path} ({tokenizer.kind}, {tokenizer.vocab_size:,} ids)")
                return 0
            (prepare_to_url if is_url(config.out) else prepare)(config)
        except RuntimeError as error:  # a tokenising process was killed, for lack of memory for example
            report(error)
            return 1
        return 0

    def config(self, usage: str = f"{_USAGE} [--option value ...]") -> PrepareConfig:
        """The preparation that is asked for. Raises ValueError (one line). usage: how the command is used."""
        for what, given in (("input", self.inputs), ("output folder", self.out)):
            if not given:
                raise ValueError(f"no {what} given: {usage}")
        return PrepareConfig(inputs=self.inputs, out=self.out, tokenizer_only=self.tokenizer_only, **self.options)

    def _merge(self) -> int:
        if self.inputs:
            raise ValueError(f"the parts know their input, leave it out: {_MERGE_USAGE}")
        check_merge(self.out, self.options, PrepareConfig, usage=_MERGE_USAGE, may_be_given="max_malformed")
        merge(self.out, dry_run=self.dry_run, max_malformed=self.options["max_malformed"])
        return 0
