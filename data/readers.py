"""Input files as a stream of chunks of raw records, from any position.

The records of a source are lines (.jsonl), documents (.txt) or rows (.parquet); reading cuts them into chunks
of about `CHUNK_BYTES`, which other processes turn into documents (documents.py). For text formats a position
is a byte offset in the decompressed file, so that reading can go on where it was left.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from matmix.data.documents import ReadOptions, not_utf8, split_text
from matmix.data.sources import Source

CHUNK_BYTES = 1 << 20
# A .txt file that is one document is read and tokenised in one piece; a larger one would need gigabytes of
# memory.
LARGEST_TEXT_DOCUMENT = 1 << 26
_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next record begins."""

    source: int = 0
    offset: int = 0
    """Bytes of the decompressed file, or rows of a .parquet file, before it."""
    line: int = 1
    """Its line, or its row, counted from 1."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of a source: raw bytes that adjoin in the file, or values of a column."""

    source: Source
    start: Position
    end: Position
    disk_bytes: int
    """How much of the file was read up to here (for progress)."""
    records: list[bytes] | list[object]


def read_chunks(sources: Sequence[Source], options: ReadOptions, start: Position | None = None) -> Iterator[Chunk]:
    """Chunks of all sources in order, from a position on.

    Raises ValueError for a damaged or non-UTF-8 file and for a .parquet file without the text column.
    """
    position = start or Position()
    for index in range(position.source, len(sources)):
        source = sources[index]
        if position.source != index:
            position = Position(source=index)
        reader = _read_parquet if source.kind == "parquet" else _read_text
        yield from reader(source, options, position)


def _read_parquet(source: Source, options: ReadOptions, start: Position) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet as parquet

    name = options.text_field
    try:
        with parquet.ParquetFile(source.path) as file:
            schema = file.schema_arrow
            if name not in schema.names:
                raise ValueError(
                    f"{source.name} has no column {name!r}; its columns are {', '.join(schema.names)} "
                    "(choose one as the text field)"
                )
            kind = schema.field(name).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise ValueError(f"column {name!r} of {source.name} is {kind}, not string")
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start.offset:
                    row += rows
                    continue
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[name]):
                    skip = min(max(0, start.offset - row), batch.num_rows)
                    row += skip
                    for values in _portions(batch.column(0).to_pylist()[skip:]):
                        begin, row = row, row + len(values)
                        yield Chunk(
                            source,
                            replace(start, offset=begin, line=begin + 1),
                            replace(start, offset=row, line=row + 1),
                            source.bytes * row // max(1, file.metadata.num_rows),
                            values,
                        )
    except pyarrow.ArrowException as error:
        raise ValueError(f"{source.name} is no .parquet file, or it is damaged: {error}") from error


def _portions(values: list[object]) -> Iterator[list[object]]:
    """Rows in portions of about `CHUNK_BYTES`."""
    begin = size = 0
    for end, value in enumerate(values, start=1):
        size += len(value) if isinstance(value, str) else 1
        if size >= CHUNK_BYTES:
            yield values[begin:end]
            begin, size = end, 0
    if begin < len(values):
        yield values[begin:]


def _read_text(source: Source, options: ReadOptions, start: Position) -> Iterator[Chunk]:
    offset, line = start.offset, start.line
    begin, records, size = start, [], 0
    with open(source.path, "rb") as raw:
        try:
            stream = _decompressed(raw, source.compression, offset)
            if offset == 0 and stream.peek(3)[:3] == _BOM:
                offset = len(stream.read(3))
                begin = replace(start, offset=offset)
            for record in _records(stream, source, options, line):
                records.append(record)
                size += len(record)
                if size >= CHUNK_BYTES:
                    offset, line = offset + size, line + sum(r.count(b"\n") for r in records)
                    end = replace(begin, offset=offset, line=line)
                    yield Chunk(source, begin, end, raw.tell(), records)
                    begin, records, size = end, [], 0
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            kind = source.compression.removeprefix(".")
            raise ValueError(f"{source.name} is damaged, or no {kind} file: {error}") from error
        if records:
            line += sum(r.count(b"\n") for r in records)
            end = replace(begin, offset=offset + size, line=line)
            yield Chunk(source, begin, end, source.bytes, records)


def _records(stream: io.BufferedReader, source: Source, options: ReadOptions, line: int) -> Iterator[bytes]:
    """Raw records of a text file; put together they are the file."""
    if source.kind == "jsonl" or options.text_documents == "line":
        yield from stream
    elif options.text_documents == "file":
        yield from _whole_file(stream, source, options.max_document_chars, line)
    elif options.text_documents == "paragraph":
        yield from _groups(stream, lambda row: not row.strip(), keep_together=True)
    else:
        mark = options.document_separator.encode()
        yield from _groups(stream, lambda row: row.strip() == mark, keep_together=False)


def _groups(stream: io.BufferedReader, is_end: Callable[[bytes], bool], *, keep_together: bool) -> Iterator[bytes]:
    """Lines up to and with the one that ends a record (with `keep_together`, the last of a run of such
    lines).
    """
    group: list[bytes] = []
    ended = False
    for row in stream:
        end = is_end(row)
        if ended and not (keep_together and end):
            yield b"".join(group)
            group = []
        group.append(row)
        ended = end
    if group:
        yield b"".join(group)


def _whole_file(stream: io.BufferedReader, source: Source, max_chars: int, line: int) -> Iterator[bytes]:
    """The file as one record, or pieces of it of at most `max_chars` characters without holding it whole."""
    limit = max(4 * CHUNK_BYTES, 16 * max_chars) if max_chars else LARGEST_TEXT_DOCUMENT
    rows: list[bytes] = []
    size = 0
    for row in stream:
        rows.append(row)
        size += len(row)
        if size <= limit:
            continue
        if not max_chars:
            raise ValueError(
                f"{source.name} has more than {LARGEST_TEXT_DOCUMENT >> 20} MiB and would be one document; "
                "cut it with --max-document-chars, or --text-documents paragraph, line or separator"
            )
        # A cut depends only on the `max_chars` characters before it, so all pieces but the last are final.
        *pieces, rest = _pieces(b"".join(rows), source, max_chars, line)
        yield from pieces
        line += sum(piece.count(b"\n") for piece in pieces)
        rows, size = [rest], len(rest)
    if rows:
        whole = b"".join(rows)
        yield from _pieces(whole, source, max_chars, line) if max_chars else [whole]


def _pieces(raw: bytes, source: Source, max_chars: int, line: int) -> list[bytes]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(source.name, raw, error, line)) from None
    return [piece.encode("utf-8") for piece in split_text(text, max_chars)]


def _decompressed(raw: io.BufferedReader, compression: str, offset: int) -> io.BufferedReader:
    """The text behind a compression, from a byte offset of the text on."""
    if not compression:
        raw.seek(offset)
        return raw
    if compression == ".gz":
        inner = gzip.GzipFile(fileobj=raw)
    elif compression == ".xz":
        inner = lzma.LZMAFile(raw)  # noqa: SIM115
    else:
        inner = _ZstdFile(raw)
    stream = io.BufferedReader(inner, _BLOCK)
    while offset > 0:
        skipped = len(stream.read(min(offset, _BLOCK)))
        if not skipped:
            raise EOFError("it is shorter than before")
        offset -= skipped
    return stream


class _ZstdFile(io.RawIOBase):
    """Zstandard frames in a row (the library's own reader takes a truncated file for a short one)."""

    def __init__(self, raw: io.BufferedReader) -> None:
        import zstandard

        self._raw, self._frame, self._error = raw, zstandard.ZstdDecompressor, zstandard.ZstdError
        self._decoder = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(1 << 17)
            if not self._input:
                if self._decoder is not None:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            if self._decoder is None:
                self._decoder = self._frame().decompressobj()
            try:
                self._output = self._decoder.decompress(self._input)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._input = b""
            if self._decoder.eof:
                self._input, self._decoder = self._decoder.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
