"""The base classes of preparations. A preparation turns the samples of one kind of data into the documents of shards.

    sources -> chunks of records -> (in several processes) documents, their splits and sums -> shards, manifest, report

To add a kind of data, write a `PrepareOptions` that names its `Preparation`; command.py does the rest.
"""

from __future__ import annotations

import abc
import dataclasses
import glob
import hashlib
import itertools
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from matmix.data.artifacts import one_line, shell_line
from matmix.data.config import Limits, check_limits
from matmix.data.formats import FORMATS
from matmix.data.manifest import Manifest, SplitInfo
from matmix.data.rng import INPUT_ORDER, generator
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import refuse_secrets

if TYPE_CHECKING:
    from pyarrow import parquet

SPLITS = ("train", "validation")
Examination = Callable[[Path, Sequence["Position"], int, Callable[[], bool]], None]
"""Looks at the whole input, together with other processes: takes a folder for what they find, positions between which
the shares of the input lie, the share to begin with (from 1), and what tells that others have gone on."""
HASHES = 2**64
"""Number of values of `hash_of`."""
KEPT_EXAMPLES = 100
# Raise it when the same options give other bytes than before.
CONTENTS_VERSION = 1
_DIGESTED = 1 << 16


class BrokenInputError(ValueError):
    """Too many records of the input are broken. The work done is kept: a larger share may be allowed."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next record begins."""

    source: int = 0
    offset: int = 0
    """Bytes of a decompressed text, rows of a .parquet file or samples before it."""
    line: int = 1
    """Its line or row, counted from 1."""


class Source(abc.ABC):
    """Some input that is read from its beginning to its end, such as a file. Other processes get a copy of it."""

    name: str
    """Name in messages and in the manifest."""
    path: str | Path
    bytes: int
    """Size on the disk."""
    end: int | None
    """The offset at its end; None where only reading all of it would tell."""

    @property
    def place(self) -> str:
        """Where another process finds it."""
        return str(Path(self.path).resolve())

    def digest(self) -> str:
        """Returns a digest of the size and of the first and last 64 KiB, which tells versions of a file apart."""
        hashed = hashlib.sha256(str(self.bytes).encode())
        with open(self.path, "rb") as file:
            hashed.update(file.read(_DIGESTED))
            file.seek(max(0, self.bytes - _DIGESTED))
            hashed.update(file.read(_DIGESTED))
        return hashed.hexdigest()

    @abc.abstractmethod
    def chunks(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        """Yields its chunks from a position on, up to an offset or its end. Raises ValueError for damaged input."""

    @property
    def weight(self) -> int:
        """Its share of the input where that is cut into parts."""
        return self.bytes

    def cut(self, places: Sequence[int], share: int) -> Sequence[int | None]:
        """Returns the offset of a record near each place (ascending, in `weight`); None = the end. share: a part's."""
        return places


def braces(item: str) -> list[str]:
    """Returns what lists in braces stand for: train-{00..02}.tar are three files. Raises ValueError (one line)."""
    if "{" not in item:
        return [item]
    from webdataset.shardlists import expand_urls  # imports torch

    try:
        return expand_urls(item)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{item}: its lists in braces cannot be read ({one_line(error)})") from None


def paths_of(item: str, missing: str) -> list[Path]:
    """Returns the path that an argument names, those of a list in braces, or the sorted ones of a glob. Raises
    FileNotFoundError where there is none, with `missing` around the path."""
    path = Path(item).expanduser()
    if path.exists():
        return [path]
    if (listed := braces(item)) != [item]:
        return [path for one in listed for path in paths_of(one, missing)]
    if not glob.has_magic(item):
        raise FileNotFoundError(missing.format(path))
    if not (paths := sorted(map(Path, glob.glob(str(path), recursive=True)))):
        raise FileNotFoundError(f"no file matches the pattern {item}")
    return paths


@contextmanager
def open_parquet(path: str | Path, name: str, **options: object) -> Iterator[parquet.ParquetFile]:
    """Opens a .parquet file. name: names it in messages. Raises ValueError (one line) where reading it meets damage."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path, **options) as file:
            yield file
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise ValueError(f"{name} is damaged, or no .parquet file ({one_line(error)})") from error


class WholeTar(tarfile.TarInfo):
    """Headers of a tar file, for `tarfile.open(..., tarinfo=WholeTar)`. Without it a file that breaks off, or goes on
    with something else, counts as one that ends there."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> WholeTar:
        try:
            return super().fromtarfile(archive)
        except (tarfile.EOFHeaderError, tarfile.SubsequentHeaderError):
            raise
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError):
            raise tarfile.ReadError("it breaks off without the mark of its end") from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"there is no header at byte {archive.offset:,} ({error})") from None


class ListedSource(Source):
    """A source whose samples can be listed, and read in any order."""

    shuffled: ClassVar[bool] = True
    """True where samples are taken in a random order, which is always the same: sources often have one class after
    another, and training mixes only what is near in the shards."""
    chunk: ClassVar[int] = 64
    """Number of samples that are read at once."""

    @abc.abstractmethod
    def items(self) -> Sequence[Any]:
        """Returns the samples in a fixed order, without their contents. Raises ValueError (one line)."""

    def record(self, item: Any) -> Any:
        """Returns a sample as chunks hold it."""
        return item

    @property
    def end(self) -> int:
        return len(self.items())

    weight = end

    def chunks(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        items = self.items()
        if self.shuffled:
            items = [items[place] for place in generator(0, 0, INPUT_ORDER, 0).permutation(len(items))]
        stop = len(items) if stop is None else stop
        for begin in range(start.offset, stop, self.chunk):
            end = min(begin + self.chunk, stop)
            ends = (Position(start.source, offset, offset + 1) for offset in (begin, end))
            yield Chunk(self, *ends, self.bytes * end // len(items), list(map(self.record, items[begin:end])))


def read_chunks(
    sources: Sequence[Source], start: Position | None = None, stop: Position | None = None
) -> Iterator[Chunk]:
    """Yields the chunks of sources in order, from a position on and up to another. Raises as `Source.chunks`."""
    start, stop = start or Position(), stop or Position(len(sources))
    for number in range(start.source, min(stop.source + 1, len(sources))):
        begin = start if number == start.source else Position(number)
        limit = stop.offset if number == stop.source else None
        if limit is None or begin.offset < limit:
            yield from sources[number].chunks(begin, limit)


def find_cuts(sources: Sequence[Source], parts: int) -> list[Position]:
    """Returns parts + 1 positions: part k, counted from 1, lies between positions k - 1 and k. The sources count as one
    line, which is cut at k/n of its length; each cut then moves to where a record begins."""
    starts = [0, *itertools.accumulate(source.weight for source in sources)]
    wanted: dict[int, list[int]] = {}
    for place in (starts[-1] * number // parts for number in range(1, parts)):
        index = min(bisect_right(starts, place), len(sources)) - 1
        wanted.setdefault(index, []).append(place - starts[index])
    cuts = [Position()]
    for index, places in wanted.items():
        offsets = sources[index].cut(places, -(-starts[-1] // parts))
        cuts += [Position(index + 1) if offset is None else Position(index, offset) for offset in offsets]
    return [*cuts, Position(len(sources))]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of a source, which one process works on."""

    source: Source
    start: Position
    end: Position
    disk_bytes: int
    """Bytes of the source that were read up to here, for progress."""
    records: Sequence[Any]
    held_out: bool = False
    """True where all belong to the validation split; else a hash of each decides."""


class Malformed(NamedTuple):
    """A record that gives no document."""

    line: int
    """Line of the file, or number of the row or sample, counted from 1."""
    reason: str


class Document(NamedTuple):
    """A document that was made of a record."""

    elements: Sequence[int] | np.ndarray
    """(n,), n >= 1."""
    raw: bytes
    """The contents before they were encoded; a hash of them decides the split."""
    size: int
    """Bytes that it counts as."""


@dataclass(kw_only=True, slots=True)
class Documents:
    """The documents of a chunk."""

    elements: np.ndarray
    """All documents, one after the other (n,)."""
    lengths: np.ndarray
    """int64 (documents,), all >= 1."""
    sizes: np.ndarray
    """int64 (documents,): bytes of each before it was encoded."""
    validation: np.ndarray
    """bool (documents,): True for those of the validation split."""
    records: int
    """Number of records, the broken ones included."""
    malformed: Sequence[Malformed]
    empty: int
    sums: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """What `Preparation.add` takes."""

    @classmethod
    def of(cls, chunk: Chunk, made: Iterable[Document | Malformed | None], dtype: str, fraction: float) -> Documents:
        """Returns what was made of a chunk, without sums. None is an empty document. fraction: share for validation."""
        made = list(made)
        documents = [one for one in made if isinstance(one, Document)]
        malformed = [one for one in made if isinstance(one, Malformed)]
        least = int(fraction * HASHES)
        held_out = [chunk.held_out or hash_of(one.raw) < least for one in documents]
        elements = (one.elements for one in documents)
        return cls(
            elements=np.concatenate([np.zeros(0, dtype), *elements], dtype=dtype, casting="unsafe"),
            lengths=np.array([len(one.elements) for one in documents], np.int64),
            sizes=np.array([one.size for one in documents], np.int64),
            validation=np.array(held_out, bool),
            records=len(chunk.records),
            malformed=malformed,
            empty=len(made) - len(documents) - len(malformed),
        )

    def split(self) -> list[np.ndarray]:
        """Returns each document as an array of its own."""
        return np.split(self.elements, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclass
class Progress:
    """How far the input was read, and what was counted there."""

    position: Position = field(default_factory=Position)
    records: int = 0
    malformed: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    """File, line and reason of the first malformed records."""
    empty: int = 0
    spans: list[list[int]] = field(default_factory=list)
    """The stretches of sources that were read: source, first offset, last offset + 1, lines, records, documents."""

    def add_malformed(self, source: str, malformed: Sequence[Malformed]) -> None:
        """Counts malformed records of a source, and keeps the first of all sources as examples."""
        self.malformed += len(malformed)
        for one in malformed[: KEPT_EXAMPLES - len(self.examples)]:
            self.examples.append({"file": source, **one._asdict()})

    def add(self, chunk: Chunk, made: Documents) -> None:
        """Counts a chunk, which begins where the last one ended."""
        self.position = chunk.end
        self.records += made.records
        self.empty += made.empty
        self.add_malformed(chunk.source.name, made.malformed)
        begin = [chunk.start.source, chunk.start.offset]
        if not self.spans or [self.spans[-1][0], self.spans[-1][2]] != begin:
            self.spans.append([*begin, chunk.start.offset, 0, 0, 0])
        span = self.spans[-1]
        span[2] = chunk.end.offset
        span[3] += chunk.end.line - chunk.start.line
        span[4] += made.records
        span[5] += len(made.lengths)


def hash_of(raw: bytes) -> int:
    """Returns the number from 0 to 2**64 - 1 that decides the split of a document, given its contents."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(abc.ABC):
    """Options of every kind of preparation."""

    verb: ClassVar[str]
    without_effect: ClassVar[Sequence[str]] = ("inputs", "out", "part", "processes")
    """Fields that decide how the work is done, and not what comes out."""

    inputs: tuple[str, ...]
    """Files, folders, globs or lists in braces; of .tar files also URLs, and pipe:COMMAND for what a command prints; of
    text also hub:NAME[@REVISION][:CONFIGURATION][:SPLIT], a dataset of the Hugging Face hub."""
    out: str
    """Folder or URL (s3://, ...) for the dataset. An unfinished one of the same options is continued, any other is
    left alone."""
    validation_fraction: float = 0.01
    """Share of the documents that go to the validation split. A hash of the contents decides which, so equal documents
    never stand on both sides. 0: no validation split."""
    format: str = "mds"
    """Kind of shards: mds (of mosaicml-streaming) or webdataset (tar files)."""
    compression: Literal["zstd", "none"] = "zstd"
    """Compression of the shards."""
    shard_megabytes: float = 64.0
    """Size of a shard before compression."""
    part: str = ""
    """Prepare only this part of the input, such as 3/64 (counted from 1), under OUT/parts. Parts may be made at the
    same time on several machines that share a file system; the same verb with --merge --out OUT then joins them."""
    processes: int = 0
    """Number of working processes; the result does not depend on it. 0: one for each core, as far as there is work."""

    @classmethod
    @abc.abstractmethod
    def kind(cls) -> type[Preparation]:
        """Returns the class of the preparation, which is made of these options."""

    def limits(self) -> Limits:
        is_part = not self.part or self.share is not None
        return [
            ("format", self.format in FORMATS, f"one of {', '.join(FORMATS)}"),
            ("processes", self.processes >= 0, "at least 0"),
            ("shard_megabytes", 0 < self.shard_megabytes <= 4000, "above 0 and at most 4000"),
            ("validation_fraction", 0 <= self.validation_fraction < 1, "in [0, 1)"),
            ("part", is_part, "k/n with a k from 1 to n, such as 1/64 for the first of 64"),
        ]

    def __post_init__(self) -> None:
        name = self.verb.removeprefix("matmix ")
        for option, value in vars(self).items():
            refuse_secrets(value, f"{name}: {option}")
        if not self.inputs:
            raise ValueError(f"{name}: no inputs are given; name files, folders or globs")
        if not self.out:
            raise ValueError(f"{name}: no output folder is given")
        check_limits(self, self.limits(), f"{name}: ")

    @property
    def share(self) -> tuple[int, int] | None:
        """(k, n) of part k/n; None without one."""
        numbers = re.fullmatch(r"(\d+)/(\d+)", self.part)
        k, n = map(int, numbers.groups()) if numbers else (0, 0)
        return (k, n) if 1 <= k <= n else None

    def arguments(self) -> list[str]:
        """Returns the command line of this preparation (of any of its parts), without --out and --part."""
        words: list[str] = []
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.name not in ("inputs", "out", "part") and value != option.default:
                values = value if isinstance(value, tuple) else (value,)
                words += [f"--{option.name.replace('_', '-')}", *map(str, values)]
        return [*self.inputs, *words]

    def of_contents(self) -> dict[str, Any]:
        """Returns the options that decide what comes out."""
        left_out = (*self.without_effect, self.kind().most_broken)
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}


class Preparation(abc.ABC):
    """A kind of data on its way into shards. Class methods work without the input, for joining parts."""

    name: ClassVar[str]
    """Name of the kind of data."""
    verb: ClassVar[str]
    unit: ClassVar[str] = "documents"
    record: ClassVar[str] = "lines"
    broken: ClassVar[str] = "malformed"
    broken_record: ClassVar[str] = "{file}, line {line}: {reason}"
    doing: ClassVar[str] = "preparing"
    counted: ClassVar[Literal["tokens", "documents"]] = "documents"
    """What the line of progress counts."""
    bytes_a_process: ClassVar[int] = 1 << 22
    """Input that occupies one process for about a second."""
    most_broken: ClassVar[str]
    """The option with the share of the records that may be broken."""
    content: ClassVar[str] = "data"
    """What an empty document lacks."""
    split_advice: ClassVar[str] = ""
    """What to do where a split is empty, after "change the fraction"."""
    files: ClassVar[Sequence[str]] = ()
    """Files and folders of a dataset that are this kind's own."""

    def __init__(
        self, config: PrepareOptions, sources: Sequence[Source], held_out: Sequence[Source] = (), **facts: Any
    ) -> None:
        """held_out: sources of the validation split alone. facts: further facts that decide what comes out."""
        self.config = config
        self.sources = [*sources, *held_out]
        self.names = [source.name for source in self.sources]
        self.n_train = len(sources)
        self.shared: dict[str, bytes] = {}
        """Files of the dataset that all documents need, such as a tokenizer."""
        digests = [[Path(s.path).name, s.bytes, s.digest()] for s in self.sources]
        inputs = {"inputs": digests[: self.n_train], "contents_version": CONTENTS_VERSION}
        if held_out:
            inputs["validation"] = digests[self.n_train :]
        self.wanted: dict[str, Any] = json.loads(json.dumps({**config.of_contents(), **facts, **inputs}))
        """The fingerprint: two preparations with the same one give the same dataset. Inputs count by name, size and
        digest, not by folder."""

    @property
    def digest(self) -> str:
        """Digest of the fingerprint."""
        return hashlib.sha256(json.dumps(self.wanted, sort_keys=True).encode()).hexdigest()

    def save_shared(self, folder: Path, *, alone: bool = True) -> None:
        """Writes the shared files that are not there. alone: as for `write_atomic`."""
        for path, content in ((folder / name, content) for name, content in self.shared.items()):
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, content, alone=alone)

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.config.validation_fraction or self.n_train < len(self.sources) else SPLITS[:1]

    def chunks(self, start: Position, stop: Position, entry: Position) -> Iterator[Chunk]:
        """Yields the chunks between two positions. entry: where the whole input, or this part of it, begins."""
        for chunk in read_chunks(self.sources, start, stop):
            yield dataclasses.replace(chunk, held_out=chunk.start.source >= self.n_train)

    # -- what a kind of data defines ---------------------------------------------------------------------------------

    dtype: str
    """Dtype of documents, once `ready` was called."""

    @abc.abstractmethod
    def worker(self) -> Callable[[Chunk], Documents]:
        """Returns the function that works on a chunk; each process gets it once, pickled."""

    def examination(self, folder: Path) -> Examination | None:
        """Returns what looks at the whole input before `ready`, where what is made of one document depends on others
        and `folder` lacks what came of that. Raises ValueError (one line) for options that cannot be met."""
        return None

    def ready(self, folder: Path, *, is_part: bool) -> None:
        """Fills `shared` and decides `fraction`, before anything is written. folder: may have the shared files already.
        Raises ValueError (one line) for an input of which nothing can be made."""
        self.fraction = self.config.validation_fraction

    def new_sums(self) -> np.ndarray:
        """Returns int64 (n,): sums over no documents."""
        return np.zeros(0, np.int64)

    @classmethod
    def add(cls, sums: np.ndarray, more: np.ndarray) -> None:
        """Adds further sums in place."""
        sums += more

    @classmethod
    def finish(cls, out: Path, options: Mapping[str, Any], splits: Sequence[str], sums: np.ndarray) -> dict[str, Any]:
        """Writes the files of this kind beside the shards; returns the members of the manifest that are its own. Raises
        ValueError (one line) where `sums` do not fit the options."""
        return {"facts": {}}

    @classmethod
    def changed_input(cls, facts: Mapping[str, Any]) -> str:
        """Returns which input has changed since the parts were begun, "" for none. facts: of `Parts`."""
        return ""

    @classmethod
    def summary(cls, manifest: Manifest) -> list[tuple[str, str]]:
        """Returns lines on what the dataset holds, each with a title."""
        return []

    @classmethod
    def amount(cls, split: SplitInfo) -> str:
        """Returns how much a split holds, beside its documents."""
        return f"{split.tokens:,} elements"

    @classmethod
    def next_step(cls, manifest: Manifest, out: Path | str) -> str:
        """Returns the command that uses the dataset."""
        return shell_line("matmix", "train", "RECIPE.toml", "--data.path", out)

    @classmethod
    def advice(cls, met: Progress) -> str:
        """Returns what to do about broken records."""
        return ""
