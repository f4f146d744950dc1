"""Datasets of the Hugging Face hub, as `datasets.load_dataset(..., streaming=True)` reads them: `hub:NAME`.

The library finds the files of a split (README.md may name them) and reads them over the network, one after another; no
copy is kept. Files of other kinds than tables of text are refused before they are opened: of those, some hold pickles.
A folder in place of a name is a clone of such a repository.
"""

from __future__ import annotations

import functools
import logging
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from matmix.data.artifacts import errors_in_one_line, from_extra, one_line, read_json
from matmix.data.manifest import MANIFEST_NAME
from matmix.data.prepare.base import Chunk, Position
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.sources import Table, place_of
from matmix.data.prepare.workspace import PARTS_NAME, WORK_NAME
from matmix.data.storage.remote import RemoteError

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

HUB = "hub:"
FILES_AT_HUB = "hf://"
_KINDS = ("parquet", "arrow", "json", "csv", "text")
_ROWS = 1024
_SECONDS = 20.0
_MOST_NAMES = 20
_LONGEST_REASON = 300


class Split(NamedTuple):
    """A split of a dataset, as `load_dataset` is asked for it."""

    path: str
    """hf://datasets/NAME, or a folder."""
    revision: str | None
    """The commit; None for a folder."""
    config: str
    name: str

    @property
    def files_below(self) -> str:
        """The beginning of the names of its files."""
        return f"{self.path}@{self.revision}/" if self.revision else f"{self.path}/"


@dataclass(frozen=True)
class HubFile(Table):
    """A file of a split. The library reads it from its beginning."""

    split: Split
    number: int
    """Among the files of its split."""
    weight: int = 0
    """The same for all of them, so that parts of the input are whole files."""

    end = None

    @property
    def place(self) -> str:
        return self.path if self.split.revision else super().place

    def digest(self) -> str:
        # What lies at a commit does not change.
        return self.path if self.split.revision else super().digest()

    def schema(self) -> pyarrow.Schema:
        with _errors(self.name):
            dataset = _dataset(self.split)
            if dataset.features is not None:
                return dataset.features.arrow_schema
            return next(dataset.with_format("arrow").iter(1)).schema

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        with _errors(self.name):
            dataset = _dataset(self.split)
            tables = iter(dataset.shard(dataset.num_shards, self.number).with_format("arrow").iter(_ROWS))
        while True:
            with _errors(self.name):
                table = next(tables, None)
            if table is None:
                return
            yield from table.to_batches()

    def portions(self, start: int, stop: int) -> Iterator[list[tuple[Any, ...]]]:
        self.check_columns()
        row, batches = 0, self.batches()
        while row < stop and (batch := next(batches, None)) is not None:
            with _errors(self.name):
                wanted = batch.select(sorted({place_of(name, batch.schema.names)[0] for name in self.options.fields}))
                wanted.validate(full=True)  # offsets of a foreign file may lead anywhere
            yield from self.rows_of(wanted, row, start, stop)
            row += batch.num_rows

    def chunks(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        row, read = start.offset, 0
        for records in self.portions(row, sys.maxsize if stop is None else stop):
            begin, end = (replace(start, offset=at, line=at + 1) for at in (row, row + len(records)))
            row, read = end.offset, read + sum(len(value or "") for record in records for value in record)
            yield Chunk(self, begin, end, min(read, self.bytes), records)

    def cut(self, places: Sequence[int], share: int) -> list[int | None]:
        if self.weight > share:
            count = _dataset(self.split).num_shards
            raise ValueError(
                f"{self.name} would be cut, and files of a hub are not: take as many parts as the split has files "
                f"({count}), or fewer, or download it (hf download, without {HUB})"
            )
        return [0 if 2 * place < self.weight else None for place in places]


def pinned(item: str, out: str) -> str:
    """Returns an input with the commit of the hub that it is read at; another input than `hub:NAME` as it is. What was
    begun in the folder `out` goes on with the commit that it was begun with. Raises FileNotFoundError, ValueError and
    RemoteError (one line) where the hub gives none."""
    if not item.startswith(HUB) or _is_folder(item):
        return item
    from huggingface_hub import HfApi

    named, *words = item.removeprefix(HUB).split(":")
    name, _, revision = named.partition("@")
    begun = "" if revision else _begun_at(Path(out).expanduser(), name)
    with _errors(f"{HUB}{named}"):
        commit = HfApi().dataset_info(name, revision=revision or begun or None, timeout=_SECONDS).sha
    if commit != revision:
        logger.info(f"{HUB}{named} is read at the commit {commit}" + (f", as {out} was begun with" if begun else ""))
    return ":".join((f"{HUB}{name}@{commit}", *words))


@errors_in_one_line()
def find_hub_files(item: str, options: ReadOptions) -> list[HubFile]:
    """Returns the files of a split, given `hub:NAME@COMMIT`, `hub:FOLDER` and behind it the names of its configuration
    and its split, which may be left out where there is one. Raises as `pinned`."""
    if options.raw_bytes:
        raise ValueError(f"{item} is read as a table of text, and --raw-bytes reads files of this machine")
    datasets = _library(item)
    named, *words = item.removeprefix(HUB).split(":")
    if len(words) > 2 or not all((named, *words)):
        raise ValueError(f"{item} is not {HUB}NAME[@REVISION][:CONFIGURATION][:SPLIT]")
    if _is_folder(item):
        path, revision = str(Path(named).expanduser().resolve()), None
        if not Path(path).is_dir():
            raise FileNotFoundError(f"{item}: {path} is no folder")
    else:
        name, _, revision = named.partition("@")
        path = f"{FILES_AT_HUB}datasets/{name}"
    with _errors(item):
        configs = datasets.get_dataset_config_names(path, revision=revision)
        config = words.pop(0) if words and (len(words) == 2 or words[0] in configs) else None
        config = config or datasets.get_dataset_default_config_name(path, revision=revision)
    if config not in configs:
        unknown = config or "".join(words)
        problem = f"has no configuration {unknown}" if unknown else "has several configurations"
        raise ValueError(f"{item} {problem}; name one of {_listed(configs)}, as in {HUB}{named}:{configs[0]}")
    found = _builder(path, revision, config, item).config.data_files
    if not words and len(found) == 1:
        words = list(map(str, found))
    if not words or words[0] not in found:
        problem = f"has no split {words[0]}" if words else "has several splits"
        names = list(map(str, found))
        raise ValueError(f"{item} {problem}; name one of {_listed(names)}, as in {HUB}{named}:{config}:{names[0]}")
    split = Split(path, revision, config, words[0])
    files = list(found[split.name])
    sizes = _sizes(files, item)
    weight = max(1, sum(sizes) // len(files))
    return [
        HubFile(one_line(file), file, size, options, split, number, weight)
        for number, (file, size) in enumerate(zip(files, sizes, strict=True))
    ]


def _library(item: str) -> ModuleType:
    """Returns the library, made quiet. Raises ValueError (one line) where it is not installed."""
    with from_extra("hf", f"{item} needs datasets"):
        import datasets
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _is_folder(item: str) -> bool:
    return item.removeprefix(HUB).startswith((".", "/", "~"))


def _begun_at(out: Path, name: str) -> str:
    """Returns the commit of a dataset that a preparation in a folder was begun with; "" where there is none."""
    beginning = f"{FILES_AT_HUB}datasets/{name}@"
    for path in (out / WORK_NAME / "options.json", out / PARTS_NAME / "options.json", out / MANIFEST_NAME):
        try:
            facts = read_json(path)
            for _, _, digest in facts.get("options", facts)["inputs"]:
                if digest.startswith(beginning):
                    return digest.removeprefix(beginning).partition("/")[0]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # nothing there, or something that is refused later
    return ""


@functools.lru_cache(maxsize=8)
def _builder(path: str, revision: str | None, config: str, item: str) -> Any:
    """Returns what finds the files of a configuration. Raises ValueError (one line) for files that are not read."""
    datasets = _library(item)
    # A folder of its own for the cache: of an earlier version that lies in the user's, nothing is taken.
    with _errors(item), tempfile.TemporaryDirectory() as cache:
        builder = datasets.load_dataset_builder(path, config, revision=revision, cache_dir=cache)
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in _KINDS:
        raise ValueError(
            f"{item} is a dataset of the kind {kind}, and of those at a hub {', '.join(_KINDS)} are read: download it "
            f"(hf download) and give its files"
        )
    below = Split(path, revision, config, "").files_below
    for file in (file for files in builder.config.data_files.values() for file in files):
        if not file.startswith(below) or ".." in file.split("/"):
            raise ValueError(
                f"{item} names the file {one_line(file)}, which is none of its own: it is not to be trusted"
            )
    return builder


@functools.lru_cache(maxsize=8)
def _dataset(split: Split) -> Any:
    return _builder(split.path, split.revision, split.config, split.path).as_streaming_dataset(split.name)


def _sizes(files: Sequence[str], item: str) -> list[int]:
    """Returns the bytes of files, of which all those in one folder are listed at once."""
    from fsspec.core import url_to_fs

    sizes: dict[str, int] = {}
    with _errors(item):
        for folder in dict.fromkeys(file.rpartition("/")[0] for file in files):
            system, path = url_to_fs(folder)
            sizes |= {info["name"]: info["size"] for info in system.ls(path, detail=True)}
        return [sizes[file.removeprefix(FILES_AT_HUB)] for file in files]


def _listed(names: Iterable[str]) -> str:
    names = list(map(one_line, names))
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Makes errors of the libraries errors of one line. what: begins it."""
    from huggingface_hub import errors

    name = what.removeprefix(HUB).partition("@")[0].partition(":")[0]
    try:
        yield
    except errors.GatedRepoError:
        page = f"https://huggingface.co/datasets/{name}"
        raise FileNotFoundError(
            f"{what} is gated: ask for access at {page}, then set HF_TOKEN to a token of that account, or hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{what}: the dataset has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{what}: the Hugging Face hub shows you no dataset of that name; for a private one set HF_TOKEN, or hf "
            "auth login"
        ) from None
    except Exception as error:  # of many kinds, of several libraries
        reason = one_line(f"{type(error).__name__}: {error}")
        if isinstance(error, FileNotFoundError) or not _of_network(error):
            raise ValueError(f"{what} cannot be read ({reason[:_LONGEST_REASON]})") from error
        if len(reason) > _LONGEST_REASON:  # of several errors inside of one another
            reason = type(error).__name__
        raise RemoteError(
            f"{what}: the Hugging Face hub cannot be read ({reason}); without a network, give {HUB}FOLDER with a copy "
            f"(hf download {name} --repo-type dataset --local-dir FOLDER)"
        ) from error


def _of_network(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "aiohttp")
