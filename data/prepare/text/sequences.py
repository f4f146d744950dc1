"""Sequences of symbols instead of text: the DNA of FASTA and FASTQ files, and the bytes of any file.

A FASTA file gives whole sequences or, with a BED file, its intervals, in the order of the sequences; both are cut into
documents of `max_document_chars` letters, which are its rows.
"""

from __future__ import annotations

import functools
import io
import itertools
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matmix.data.alphabets import AMBIGUOUS, BASES
from matmix.data.artifacts import from_extra, one_line
from matmix.data.prepare.base import Source
from matmix.data.prepare.text import sources
from matmix.data.prepare.text.compressed import open_text
from matmix.data.prepare.text.documents import decode
from matmix.data.prepare.text.sources import Rows
from matmix.data.prepare.text.texts import TextFile

if TYPE_CHECKING:
    import pyfaidx

_UPPER = BASES + "U" + AMBIGUOUS
_LETTERS = (_UPPER + _UPPER.lower()).encode()
# Digits of the largest place that a BED file may name.
_DIGITS = 12
_LINES = (
    "lines of a sequence, all but its last, must be as long as its first, and none blank: write them anew "
    "(seqtk seq -l 60), or compress the file with gzip, and it needs no index"
)


class Interval(NamedTuple):
    """Letters of a sequence, and the line of the BED file that names them."""

    start: int
    end: int
    line: int


@dataclass(frozen=True)
class FastaFile(Rows):
    """The sequences of a FASTA file. pyfaidx reads it by its index: the .fai beside it, if that is not older, or one
    that is made for the moment. A compressed file is read from its beginning, once more for its index."""

    compression: str
    """"" or the suffix .gz, .xz, .zst."""

    takes = ("intervals",)

    @property
    def end(self) -> int:
        return self._documents[-1]

    def lengths(self) -> Mapping[str, int]:
        """Returns the sequences with the number of their letters, in order. Raises ValueError (one line)."""
        return _lengths(self, _version(self.path))

    def portions(self, start: int, stop: int) -> Iterator[list[str]]:
        return _portions(self._read(start, stop))

    @property
    def _spans(self) -> list[tuple[str, int, int]]:
        return _spans(self, _version(self.path), _version(self.options.intervals))

    @property
    def _documents(self) -> list[int]:
        """The number of the first document of each span, and that of all."""
        width = self.options.max_document_chars
        counts = (-(-(end - start) // width) if width else 1 for _, start, end in self._spans)
        return list(itertools.accumulate(counts, initial=0))

    def _read(self, start: int, stop: int) -> Iterator[str]:
        spans, firsts, width = self._spans, self._documents, self.options.max_document_chars
        with self._opened() as fetch:
            while start < stop:
                index = bisect_right(firsts, start) - 1
                (name, begin, end), until = spans[index], min(stop, firsts[index + 1])
                for number in range(start, until):
                    first = begin + (number - firsts[index]) * width
                    last = min(end, first + width) if width else end
                    letters = letters_of(fetch(name, first, last), self.name, f"sequence {name}", first)
                    if len(letters) < last - first:
                        raise ValueError(f"{self.name}, sequence {one_line(name)}: its lines or its index are damaged")
                    yield letters if letters.strip("Nn") else ""  # nothing is known of it
                start = until

    @contextmanager
    def _opened(self) -> Iterator[Callable[[str, int, int], bytes]]:
        """Gives a function of a sequence's name, the first letter and the one behind the last."""
        if not self.compression:
            fasta = _indexed(self, _version(self.path))
            try:
                yield lambda name, start, end: fasta[name][start:end].encode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} holds what are no letters: {error}") from None
            return
        held = ("", b"")
        with closing(self._records()) as records:

            def fetch(name: str, start: int, end: int) -> bytes:
                nonlocal held
                while held[0] != name:
                    held = next(records)
                return held[1][start:end]

            yield fetch

    def _records(self) -> Iterator[tuple[str, bytes]]:
        """Yields the names and letters of the sequences of a compressed file."""
        longest, name, parts = self.options.longest_line, "", []
        with open_text(self.path, self.compression, 0, self.name) as (stream, _):
            for number in itertools.count(1):
                line = stream.readline(longest + 1)
                if len(line) > longest:
                    raise self.too_long(f"line {number}")
                if line[:1] == b">" or not line:
                    if name:
                        yield name, b"".join(parts)
                    if not line:
                        return
                    name, parts = next(iter(decode(line[1:], self.name, number).split()), ""), []
                    if not name:
                        raise ValueError(f"{self.name}, line {number}: a sequence without a name")
                elif line := line.strip():
                    if not name:
                        raise ValueError(f"{self.name} is no FASTA file: line {number} stands before the first >")
                    letters_of(line, self.name, f"line {number}")
                    parts.append(line)


class FastqFile(TextFile):
    """The reads of a FASTQ file, four lines each. Names and qualities are left out."""

    takes = ()
    _records_are = "read"

    def _records(self, stream: io.BufferedReader, line: int) -> Iterator[bytes]:
        rows = self._rows(stream, line)
        while read := list(itertools.islice(rows, 4)):
            if any(row.strip() for row in read):  # blank lines at the end
                starts = [row[:1] for row in read]
                sizes = [len(row.strip()) for row in read]
                if len(read) < 4 or starts[0] != b"@" or starts[2] != b"+" or sizes[1] != sizes[3]:
                    raise ValueError(
                        f"{self.name}, line {line}, begins no read: four lines, @name, letters, + and as many qualities"
                    )
                letters_of(read[1].strip(), self.name, f"line {line + 1}")
            yield b"".join(read)
            line += len(read)

    def _next_record(self, offset: int) -> int:
        if offset == 0:
            return 0
        with self.open(offset - 1) as (file, _):
            rows = self._rows(file, 1)
            place, seen = offset - 1 + len(next(rows, b"")), []
            for row in rows:
                seen = [*seen[-2:], (place, row[:1])]
                # Qualities may begin with @ as well, but two lines on stand letters then.
                if len(seen) == 3 and (seen[0][1], seen[2][1]) == (b"@", b"+"):
                    return seen[0][0]
                place += len(row)
        return self.bytes


class RawFile(Rows):
    """The bytes of a file, whatever is in it, in documents of `max_document_chars` bytes."""

    takes = ()

    @property
    def _width(self) -> int:
        if not self.options.max_document_chars and self.bytes > self.options.longest_line:
            raise ValueError(
                f"{self.name} has {self.bytes:,} bytes and would be one document; cut it with --max-document-chars"
            )
        return self.options.max_document_chars or max(1, self.bytes)

    @property
    def end(self) -> int:
        return -(-self.bytes // self._width)

    def portions(self, start: int, stop: int) -> Iterator[list[bytearray]]:
        def read() -> Iterator[bytearray]:
            with open(self.path, "rb") as file:
                file.seek(start * self._width)
                for _ in range(start, stop):
                    yield bytearray(file.read(self._width))

        return _portions(read())


def _portions(documents: Iterable[Any]) -> Iterator[list[Any]]:
    found, size = [], 0
    for document in documents:
        found.append(document)
        size += len(document)
        if size >= sources.CHUNK_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found


def letters_of(raw: bytes, name: str, where: str, before: int = 0) -> str:
    """Returns letters of DNA or RNA as text. before: how many come before them. Raises ValueError (one line) for any
    other letter."""
    if wrong := raw.translate(None, _LETTERS):
        place = before + raw.index(wrong[:1]) + 1
        raise ValueError(
            f"{name}, {one_line(where)}: letter {place:,} is {chr(wrong[0])!a}, which is none of DNA or RNA "
            f"({_UPPER}); proteins are not read"
        )
    return raw.decode("ascii")


def check_intervals(found: Iterable[Source], bed: str, *, disjoint: bool = False) -> None:
    """Raises ValueError (one line) unless each interval of a BED file lies in a sequence of one of the FASTA files,
    FileNotFoundError without it. disjoint: also where two of them overlap, which might go to different splits."""
    if not Path(bed).is_file():
        raise FileNotFoundError(f"the file of intervals {bed} does not exist")
    known: dict[str, tuple[str, int]] = {}
    for file in found:
        for name, length in file.lengths().items() if isinstance(file, FastaFile) else ():
            if name in known:
                raise ValueError(f"{known[name][0]} and {file.name} both have a sequence {name!a}: give one of them")
            known[name] = file.name, length
    for name, spans in _intervals(bed, _version(bed)).items():
        if name not in known:
            have = one_line(", ".join(list(known)[:5])) or "none"
            raise ValueError(f"{bed}, line {spans[0].line}: no FASTA file has a sequence {name!a}; there are {have}")
        file, length = known[name]
        for start, end, line in spans:
            if end > length:
                wanted = f"{bed}, line {line}: {one_line(name)} {start}-{end}"
                raise ValueError(f"{wanted} ends behind the {length:,} letters that {file} has")
        for one, other in itertools.pairwise(sorted(spans)) if disjoint else ():
            if other.start < one.end:
                lines = f"{bed}, lines {min(one.line, other.line)} and {max(one.line, other.line)}"
                raise ValueError(
                    f"{lines}: intervals of {one_line(name)} overlap, and letters for validation would be trained on; "
                    "merge them (bedtools merge), or set --validation-fraction 0"
                )


def _version(path: str) -> tuple[int, int] | None:
    """Returns what tells versions of a file apart, for caches; None without a path."""
    return (Path(path).stat().st_size, Path(path).stat().st_mtime_ns) if path else None


@functools.lru_cache(maxsize=4)
def _indexed(file: FastaFile, version: tuple[int, int]) -> pyfaidx.Fasta:
    """Opens an uncompressed file with its index. Raises ValueError (one line)."""
    with from_extra("dna", "FASTA files need pyfaidx"):
        import pyfaidx
    beside = Path(f"{file.path}.fai")
    use = beside.is_file() and beside.stat().st_mtime_ns >= version[1]
    with tempfile.TemporaryDirectory() as scratch:
        index = beside if use else Path(scratch) / "index.fai"
        try:
            fasta = pyfaidx.Fasta(file.path, indexname=str(index), as_raw=True, rebuild=False)
            fits = not use or all(_fits(file, record) for record in fasta.faidx.index.values())
        except Exception as error:  # of many kinds
            what = one_line(error)
            if isinstance(error, RuntimeError):  # several lines of a sequence are not like its first
                what = _LINES
            elif "not consistent" in what:
                what = f"{what.rstrip('.')}; {_LINES}"
            raise ValueError(f"{beside if use else file.name} cannot be read: {what}") from error
    if not fits:
        raise ValueError(f"{beside} does not fit {file.name}: remove it, or make it again (samtools faidx)")
    return fasta


def _fits(file: FastaFile, record: Any) -> bool:
    """Returns True where an entry of an index begins behind a line and ends with one, before a > or the file's end."""
    if record.rlen < 0 or not 0 <= record.lenc <= record.lenb <= record.lenc + 2:
        return False
    if not 0 < record.offset <= record.bend <= file.bytes + 2:  # the last line may have no end
        return False
    with open(file.path, "rb") as raw:
        raw.seek(record.offset - 1)
        before = raw.read(1)
        raw.seek(record.bend - 1)
        last, after = raw.read(1), raw.read(4).lstrip()[:1]
        return before == b"\n" and last in (b"\n", b"") and after in (b">", b"")


@functools.lru_cache(maxsize=64)
def _lengths(file: FastaFile, version: tuple[int, int]) -> dict[str, int]:
    if not file.compression:
        return {name: record.rlen for name, record in _indexed(file, version).faidx.index.items()}
    lengths: dict[str, int] = {}
    for name, letters in file._records():
        if name in lengths:
            raise ValueError(f"{file.name} has two sequences {name!a}")
        lengths[name] = len(letters)
    return lengths


@functools.lru_cache(maxsize=64)
def _spans(file: FastaFile, version: tuple[int, int], bed: tuple[int, int] | None) -> list[tuple[str, int, int]]:
    """Returns the sequences or intervals to read, each with its first letter and the one behind its last."""
    if file.options.intervals:
        named = _intervals(file.options.intervals, bed)
        spans = [(name, *span[:2]) for name in file.lengths() for span in named.get(name, ())]
    else:
        spans = [(name, 0, length) for name, length in file.lengths().items() if length]
    for name, start, end in spans:
        if not file.options.max_document_chars and end - start > file.options.longest_line:
            raise ValueError(
                f"{file.name}: {one_line(name)} has {end - start:,} letters and would be one document; cut it with "
                "--max-document-chars, or name --intervals"
            )
    return spans


@functools.lru_cache(maxsize=4)
def _intervals(bed: str, version: tuple[int, int]) -> dict[str, list[Interval]]:
    """Returns the intervals of a BED file by sequence. Raises ValueError (one line) for a line that is none."""
    found: dict[str, list[Interval]] = {}
    for number, line in enumerate(decode(Path(bed).read_bytes(), bed, 1).splitlines(), 1):
        if not line.strip() or line.startswith(("#", "track ", "browser ")):
            continue
        name, *places = line.split("\t" if "\t" in line else None)[:3]
        fine = len(places) == 2 and all(place.strip().isdecimal() and len(place) <= _DIGITS for place in places)
        if not fine or int(places[0]) >= int(places[1]):
            raise ValueError(f"{bed}, line {number}: write chromosome, start and end, from 0 on and end not included")
        found.setdefault(name, []).append(Interval(*map(int, places), number))
    return found
