"""The base classes of preparations. A preparation turns the samples of one kind of data into the documents of shards.

    sources -> chunks of records -> (in several processes) documents, their splits and sums -> shards, manifest, report

To add a kind of data, write a `PrepareOptions` that names its `Preparation`; `prepare` in command.py does the rest:
several processes, resuming with the same bytes, parts on several machines, uploads and reports.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from matmix.data.artifacts import one_line, shell_line
from matmix.data.formats import FORMATS
from matmix.data.manifest import Manifest, SplitInfo
from matmix.data.rng import INPUT_ORDER, generator
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import refuse_secrets

if TYPE_CHECKING:
    from pyarrow import parquet

SPLITS = ("train", "validation")
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


class Source:
    """Some input that is read from its beginning to its end, such as a file. Other processes get a copy of it."""

    name: str
    """Name in messages and in the manifest."""
    path: str | Path
    bytes: int
    """Size on the disk."""

    @property
    def end(self) -> int | None:
        """The offset at its end; None where only reading all of it would tell."""
        return None

    def digest(self) -> str:
        """Returns a digest of the size and of the first and last 64 KiB, which tells versions of a file apart."""
        hashed = hashlib.sha256(str(self.bytes).encode())
        with open(self.path, "rb") as file:
            hashed.update(file.read(_DIGESTED))
            file.seek(max(0, self.bytes - _DIGESTED))
            hashed.update(file.read(_DIGESTED))
        return hashed.hexdigest()


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


class ListedSource(Source, abc.ABC):
    """A source whose samples can be listed, and read in any order."""

    shuffled: ClassVar[bool] = True
    """True where samples are taken in a random order, which is always the same: sources often have one class after
    another, and training mixes only what is near in the shards."""
    chunk: ClassVar[int] = 64
    """Number of samples that are read at once."""

    @abc.abstractmethod
    def items(self) -> Sequence[Any]:
        """Returns the samples in a fixed order, without their contents. Raises ValueError (one line)."""

    @property
    def end(self) -> int:
        """The number of samples."""
        return len(self.items())

    def ordered(self) -> Sequence[Any]:
        """Returns the samples in the order in which they are prepared."""
        items = self.items()
        if not self.shuffled:
            return items
        return [items[place] for place in generator(0, 0, INPUT_ORDER, 0).permutation(len(items))]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of a source, which one process works on."""

    source: Source
    start: Position
    end: Position
    disk_bytes: int
    """Bytes of the source that were read up to here, for progress."""
    records: Sequence[Any]
    validation: bool | None = None
    """True or False where all belong to one split; None where a hash of each decides."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A record that gives no document."""

    line: int
    """Line of the file, or number of the row or sample, counted from 1."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The documents of a chunk. A document is an array of one axis."""

    elements: np.ndarray
    """All documents, one after the other (n,)."""
    lengths: np.ndarray
    """int64 (documents,), all >= 1."""
    sizes: np.ndarray
    """int64 (documents,): bytes of each before it was encoded."""
    validation: np.ndarray
    """bool (documents,): True for those of the validation split."""
    sums: np.ndarray
    """What `Preparation.add` takes."""
    records: int
    """Number of records, the broken ones included."""
    malformed: int = 0
    examples: Sequence[Malformed] = ()
    """The first of the malformed records."""
    empty: int = 0

    @classmethod
    def of(cls, documents: Sequence[np.ndarray], dtype: str, **values: Any) -> Documents:
        """Returns documents that are separate arrays."""
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        return cls(elements=np.concatenate([np.zeros(0, dtype), *documents]), lengths=lengths, **values)

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

    def add_malformed(self, source: str, examples: Sequence[Malformed], count: int) -> None:
        """Counts `count` malformed records of a source, and keeps the first examples of all sources."""
        self.malformed += count
        for one in examples[: KEPT_EXAMPLES - len(self.examples)]:
            self.examples.append({"file": source, "line": one.line, "reason": one.reason})

    def add(self, chunk: Chunk, made: Documents) -> None:
        """Counts a chunk, which begins where the last one ended."""
        self.position = chunk.end
        self.records += made.records
        self.empty += made.empty
        self.add_malformed(chunk.source.name, made.examples, made.malformed)
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


def in_validation(raw: bytes, fraction: float) -> bool:
    """Returns True for the share `fraction` of all contents that belongs to the validation split."""
    return hash_of(raw) < int(fraction * HASHES)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(abc.ABC):
    """Options of every kind of preparation."""

    verb: ClassVar[str]
    without_effect: ClassVar[Sequence[str]] = ("inputs", "out", "part", "processes")
    """Fields that decide how the work is done, and not what comes out."""

    inputs: tuple[str, ...]
    """Files, folders or globs."""
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

    def limits(self) -> list[tuple[str, bool, str]]:
        """Returns for each field its name, whether its value is fine, and the values that are."""
        return [
            ("format", self.format in FORMATS, f"one of {', '.join(FORMATS)}"),
            ("processes", self.processes >= 0, "at least 0"),
            ("shard_megabytes", 0 < self.shard_megabytes <= 4000, "above 0 and at most 4000"),
            ("validation_fraction", 0 <= self.validation_fraction < 1, "in [0, 1)"),
        ]

    def __post_init__(self) -> None:
        name = self.verb.removeprefix("matmix ")
        for option in dataclasses.fields(self):
            refuse_secrets(getattr(self, option.name), f"{name}: {option.name}")
        if not self.inputs:
            raise ValueError(f"{name}: no inputs are given; name files, folders or globs")
        if not self.out:
            raise ValueError(f"{name}: no output folder is given")
        for option, fine, allowed in self.limits():
            if not fine:
                raise ValueError(f"{name}: {option} must be {allowed}, got {getattr(self, option)!r}")
        if self.part and self.share is None:
            raise ValueError(
                f"{name}: part must be k/n with a k from 1 to n, such as 1/64 for the first of 64, got {self.part}"
            )

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

    def save_shared(self, folder: Path, *, alone: bool = True) -> None:
        """Writes the shared files that are not there. alone: as for `write_atomic`."""
        for path, content in ((folder / name, content) for name, content in self.shared.items()):
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, content, alone=alone)

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.config.validation_fraction or self.n_train < len(self.sources) else SPLITS[:1]

    # -- what a kind of data defines ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def dtype(self) -> str:
        """Returns the dtype of documents, once `ready` was called."""

    @abc.abstractmethod
    def worker(self, folder: Path) -> Callable[[], Callable[[Chunk], Documents]]:
        """Returns a function, to be pickled, that gives the function that works on a chunk; each process calls it once.

        folder: has the shared files.
        """

    def ready(self, folder: Path, *, is_part: bool) -> None:
        """Fills `shared` and decides `fraction`. folder: where shared files may lie that an earlier call has written.

        Raises ValueError (one line) for an input of which nothing can be made; nothing is written before.
        """
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
        """Writes the files of this kind beside the shards; returns the members of the manifest that are its own.

        Raises ValueError (one line) where `sums` do not fit the options.
        """
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
    def shown(cls, example: Mapping[str, Any]) -> str:
        """Returns a broken record in words."""
        return f"{example['file']}, line {example['line']}: {example['reason']}"

    @classmethod
    def advice(cls, met: Progress) -> str:
        """Returns what to do about broken records."""
        return ""

    # -- the input ---------------------------------------------------------------------------------------------------

    def chunks(self, start: Position, stop: Position, entry: Position) -> Iterator[Chunk]:
        """Yields the chunks from a position on, up to another. Raises ValueError (one line) for damaged input.

        entry: where the whole input, or this part of it, begins.
        """
        for number in range(start.source, min(stop.source + 1, len(self.sources))):
            source = self.sources[number]
            items = source.ordered()
            last = stop.offset if number == stop.source else len(items)
            held_out = number >= self.n_train
            for begin in range(start.offset if number == start.source else 0, last, source.chunk):
                some = items[begin : min(begin + source.chunk, last)]
                end = begin + len(some)
                yield Chunk(
                    source,
                    Position(number, begin, begin + 1),
                    Position(number, end, end + 1),
                    source.bytes * end // len(items),
                    [self.record_of(source, item) for item in some],
                    held_out if held_out or not self.fraction else None,
                )

    def record_of(self, source: Source, item: Any) -> Any:
        """Returns a sample of a `ListedSource` for a chunk."""
        return item

    def cuts(self, parts: int) -> list[Position]:
        """Returns parts + 1 positions: part k, counted from 1, lies between positions k - 1 and k.

        Parts of listed sources have the same number of samples, give or take one.
        """
        counts = [source.end for source in self.sources]
        return [_place(counts, sum(counts) * number // parts) for number in range(parts + 1)]


def _place(counts: Sequence[int], number: int) -> Position:
    """Returns the position of a sample, numbered through all sources."""
    for source, count in enumerate(counts):
        if number < count:
            return Position(source=source, offset=number)
        number -= count
    return Position(source=len(counts))
