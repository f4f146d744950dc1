"""Finds the text files that arguments name, and reads each as a stream of chunks of raw records, from any position.

Records are lines (.jsonl), documents (.txt) or rows (.parquet); a position in a text is a byte offset in the
decompressed file. A file that can be entered anywhere (lines of uncompressed text, rows) is cut into parts at the next
record. One that can only be read from its beginning (compressed, or cut into pieces of `max_document_chars`) stays
whole in one part unless it is larger than a part; then it is read through once to find its records.
"""

from __future__ import annotations

import glob
import io
import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from matmix.data.artifacts import check_utf8, one_line
from matmix.data.corpora import bundled_path
from matmix.data.prepare.base import Chunk, Position, Source, open_parquet, paths_of
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.compressed import DECODERS, open_text
from matmix.data.prepare.text.documents import decode, split_text

if TYPE_CHECKING:
    import pyarrow

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20
# A .txt file that is one document is read and tokenised in one piece; a larger one would need gigabytes of memory.
LARGEST_TEXT_DOCUMENT = 1 << 26
# Bytes of a text that is read through, for each of which at most one end of a record is remembered.
REMEMBERED_BYTES = 1 << 16
_KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def find_sources(inputs: Sequence[str], options: ReadOptions | None = None) -> tuple[list[TextFile], list[str]]:
    """Returns the files that paths, folders (with their subfolders), globs and `bundled:NAME` name, without repetition,
    in the order of the arguments, and those of folders and globs that were passed over for their suffix.

    Raises FileNotFoundError for a path or pattern without a file, ValueError for a suffix that cannot be read and a
    name that is not UTF-8.
    """
    sources: dict[str, TextFile] = {}
    ignored: list[str] = []
    for item in inputs:
        before = len(ignored)
        paths = _expand(item)
        for path in paths:
            compression = path.suffix.lower() if path.suffix.lower() in DECODERS else ""
            kind = _KINDS.get(Path(path.stem if compression else path).suffix.lower())
            if kind is None or (kind == "parquet" and compression):
                ignored.append(str(path))
                continue
            check_utf8(str(path), "the file name {}", "rename it")
            name = item if item.startswith("bundled:") else str(path)
            source = TextFile(name, str(path), kind, compression, path.stat().st_size, options or ReadOptions())
            sources.setdefault(str(path.resolve()), source)
        if len(ignored) - before == len(paths):
            is_file = Path(item).expanduser().is_file()
            what = "has a suffix that cannot be read" if is_file else "holds no file that can be read"
            raise ValueError(f"{item} {what}; give .txt or .jsonl files (also .gz, .xz, .zst) or .parquet files")
    return list(sources.values()), ignored


def _expand(item: str) -> list[Path]:
    """Returns all files that an argument names, whatever their suffix."""
    if item.startswith("bundled:"):
        return [bundled_path(item.removeprefix("bundled:"))]
    if "://" in item:
        raise ValueError(f"{item} is a URL, and prepare reads files of this machine: download it first")
    files: list[Path] = []
    for path in paths_of(item, "data path {} does not exist"):
        if path.is_dir():
            below = (path / name for name in glob.glob("**", root_dir=path, recursive=True))  # without hidden ones
            files += sorted(file for file in below if not file.is_dir())
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path} is neither a file nor a folder")
    return files


@dataclass(frozen=True)
class TextFile(Source):
    """One input file."""

    name: str
    path: str
    kind: Literal["txt", "jsonl", "parquet"]
    compression: str
    """"" or the suffix .gz, .xz, .zst."""
    bytes: int
    options: ReadOptions

    @property
    def end(self) -> int | None:
        if self.kind == "parquet":
            with open_parquet(self.path, self.name) as file:
                return file.metadata.num_rows
        # A file of a byte order mark alone has no records.
        return None if self.compression or self.bytes <= len(BOM) else self.bytes

    @property
    def _records_are(self) -> str:
        return "line" if self.kind == "jsonl" else self.options.text_documents

    def chunks(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        return (self._read_parquet if self.kind == "parquet" else self._read_text)(start, stop)

    # -- .parquet ----------------------------------------------------------------------------------------------------

    def _read_parquet(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        name = self.options.text_field
        self._check_column(name)
        # As a dictionary, so that a long value that stands in many rows is in memory once until it is cut to size.
        with open_parquet(self.path, self.name, read_dictionary=[name]) as file:
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start.offset:
                    row += rows
                    continue
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[name]):
                    skip = min(max(0, start.offset - row), batch.num_rows)
                    end = batch.num_rows if stop is None else min(batch.num_rows, stop - row)
                    row += skip
                    for values in self._portions(batch.column(0)[skip:end], row):
                        begin, after = (replace(start, offset=at, line=at + 1) for at in (row, row + len(values)))
                        row = after.offset
                        yield Chunk(self, begin, after, self.bytes * row // max(1, file.metadata.num_rows), values)
                    if row == stop:
                        return

    def _check_column(self, name: str) -> None:
        """Raises ValueError unless a .parquet file has a column of text under this name."""
        import pyarrow

        with open_parquet(self.path, self.name) as file:
            schema = file.schema_arrow
        if name not in schema.names:
            raise ValueError(
                f"{self.name} has no column {name!r}; its columns are {one_line(', '.join(schema.names))} "
                "(choose one with --text-field)"
            )
        kind, types = schema.field(name).type, pyarrow.types
        values = kind.value_type if types.is_dictionary(kind) else kind  # how a categorical column is kept
        if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
            raise ValueError(f"column {name!r} of {self.name} is {kind}, not string")

    def _portions(self, values: pyarrow.DictionaryArray, row: int) -> Iterator[list[object]]:
        """Yields rows in portions of about `CHUNK_BYTES`; `row` rows of the file come before them."""
        import pyarrow.compute as compute

        lengths = compute.binary_length(values.dictionary).take(values.indices)
        sizes = compute.fill_null(lengths, 1).to_numpy()
        if (sizes > self.options.longest_line).any():
            raise self._too_long(f"row {row + int((sizes > self.options.longest_line).argmax()) + 1}")
        begin = size = 0
        for end, length in enumerate(sizes.tolist(), start=1):
            size += length
            if size >= CHUNK_BYTES or end == len(sizes):
                yield values[begin:end].to_pylist()
                begin, size = end, 0

    # -- texts -------------------------------------------------------------------------------------------------------

    def open(self, offset: int = 0) -> AbstractContextManager[tuple[io.BufferedReader, io.BufferedReader]]:
        """Opens the text, from a byte offset on, and the file on the disk, which may be compressed."""
        return open_text(self.path, self.compression, offset, self.name)

    def _read_text(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        begin, records, size = start, [], 0
        with self.open(start.offset) as (stream, raw):
            if start.offset == 0 and stream.peek(3)[:3] == BOM:
                size = len(stream.read(3))
            # None comes after the last record of the file.
            for record in itertools.chain(self._records(stream, start.line), [None]):
                if record is not None:
                    records.append(record)
                    size += len(record)
                # Records are read past the end and dropped there, so that they are cut as in a reading without an end.
                last = record is None or (stop is not None and begin.offset + size >= stop)
                if records and (size >= CHUNK_BYTES or last):
                    line = begin.line + sum(r.count(b"\n") for r in records)
                    end = replace(begin, offset=begin.offset + size, line=line)
                    yield Chunk(self, begin, end, self.bytes if record is None else raw.tell(), records)
                    begin, records, size = end, [], 0
                if last:
                    return

    def _records(self, stream: io.BufferedReader, line: int) -> Iterator[bytes]:
        """Returns the raw records of a text; joined, they are the file. Raises ValueError at one that is too long."""
        rows = self._rows(stream, line)
        if self._records_are == "line":
            return rows
        return self._whole_file(rows, line) if self._records_are == "file" else self._groups(rows, line)

    def _rows(self, stream: io.BufferedReader, line: int) -> Iterator[bytes]:
        longest = self.options.longest_line
        while row := stream.readline(longest + 1):
            if len(row) > longest:
                raise self._too_long(f"line {line}")
            line += 1
            yield row

    def _groups(self, rows: Iterable[bytes], line: int) -> Iterator[bytes]:
        """Yields records that end with a separator, or with the last blank line of a run of them."""
        paragraphs, mark = self._records_are == "paragraph", self.options.document_separator.strip().encode()
        group: list[bytes] = []
        ended, size = False, 0
        for row in rows:
            end = not row.strip() if paragraphs else row.strip() == mark
            if ended and not (paragraphs and end):
                yield b"".join(group)
                line += len(group)
                group, size = [], 0
            group.append(row)
            size += len(row)
            if size > self.options.longest_line:
                raise self._too_long(f"the document that begins at line {line}")
            ended = end
        if group:
            yield b"".join(group)

    def _whole_file(self, lines: Iterable[bytes], line: int) -> Iterator[bytes]:
        """Yields the file as one record, or in pieces of `max_document_chars` without holding it whole."""
        longest = self.options.max_document_chars
        limit = max(4 * CHUNK_BYTES, 16 * longest) if longest else LARGEST_TEXT_DOCUMENT
        rest = bytearray()
        for row in lines:
            rest += row
            if len(rest) <= limit:
                continue
            if not longest:
                raise ValueError(
                    f"{self.name} has more than {LARGEST_TEXT_DOCUMENT >> 20} MiB and would be one document; "
                    "cut it with --max-document-chars, or --text-documents paragraph, line or separator"
                )
            # A cut depends only on the characters of a piece before it, so all pieces but the last are final.
            *pieces, last = self._pieces(rest, line)
            yield from pieces
            line += sum(piece.count(b"\n") for piece in pieces)
            rest = bytearray(last)
        if rest:
            yield from self._pieces(rest, line) if longest else [bytes(rest)]

    def _pieces(self, raw: bytearray, line: int) -> list[bytes]:
        text = decode(raw, self.name, line)
        return [piece.encode("utf-8") for piece in split_text(text, self.options.max_document_chars)]

    def _too_long(self, where: str) -> ValueError:
        return ValueError(
            f"{self.name}, {where}, is longer than {self.options.max_line_megabytes:g} MiB: the file is damaged or not "
            "what it seems; else raise --max-line-megabytes"
        )

    # -- parts -------------------------------------------------------------------------------------------------------

    def cut(self, places: Sequence[int], share: int) -> list[int | None]:
        if self.kind == "parquet":
            rows = self.end
            cuts = [rows * place // max(1, self.bytes) for place in places]
            return [row if row < rows else None for row in cuts]
        whole = self._records_are == "file"
        if not whole and not self.compression:
            cuts = [self._next_record(place) for place in places]
            return [offset if offset < self.bytes else None for offset in cuts]
        if self.bytes <= share or (whole and not self.options.max_document_chars):
            return [0 if 2 * place < self.bytes else None for place in places]
        ends, last = array("q"), 0
        for last in record_offsets(self):
            if last - (ends[-1] if ends else 0) >= REMEMBERED_BYTES:
                ends.append(last)
        ends.insert(0, 0)
        chosen = [bisect_left(ends, last * place // self.bytes) for place in places]
        return [ends[i] if i < len(ends) and ends[i] < last else None for i in chosen]

    def _next_record(self, offset: int) -> int:
        """Returns where the first record begins that surely begins at or after a byte of an uncompressed text, or its
        size. What stands before is not read, so one record of several lines may be passed over."""
        if offset == 0:
            return 0
        begin = offset - 1
        with self.open(begin) as (file, _):
            entered = replace(self, name=f"{self.name} from byte {begin:,}")
            rows = entered._rows(file, 1)
            position = begin + len(next(rows, b""))
            return position + (0 if self._records_are == "line" else len(next(entered._groups(rows, 1), b"")))


def record_offsets(source: TextFile) -> Iterator[int]:
    """Yields where the records of a text file end, in bytes of the decompressed file, by reading all of it."""
    with source.open() as (stream, _):
        offset = len(stream.read(3)) if stream.peek(3)[:3] == BOM else 0
        for record in source._records(stream, 1):
            offset += len(record)
            yield offset
