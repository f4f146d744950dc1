"""Input files as a stream of chunks of raw records, from any position.

The records of a source are lines (.jsonl), documents (.txt) or rows (.parquet); reading cuts them into chunks
of about `CHUNK_BYTES`, which other processes turn into documents (documents.py). For text formats a position
is a byte offset in the decompressed file, so that reading can go on where it was left.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from matmix.data.artifacts import one_line
from matmix.data.prepare.documents import ReadOptions, decode, split_text
from matmix.data.prepare.sources import Chunk, Position, Source

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

CHUNK_BYTES = 1 << 20
# A .txt file that is one document is read and tokenised in one piece; a larger one would need gigabytes of
# memory.
LARGEST_TEXT_DOCUMENT = 1 << 26
_BOM = b"\xef\xbb\xbf"


def read_chunks(
    sources: Sequence[Source], options: ReadOptions, start: Position | None = None, stop: Position | None = None
) -> Iterator[Chunk]:
    """Chunks of all sources in order, from a position on and up to another (where a record begins).

    Raises ValueError for a damaged or non-UTF-8 file and for a .parquet file without the text column.
    """
    position = start or Position()
    for index in range(position.source, len(sources)):
        source = sources[index]
        if position.source != index:
            position = Position(source=index)
        limit = None if stop is None or stop.source > index else stop.offset if stop.source == index else 0
        if limit is not None and position.offset >= limit:
            return
        reader = _read_parquet if source.kind == "parquet" else _read_text
        yield from reader(source, options, position, limit)


@contextlib.contextmanager
def _parquet(source: Source, **options: object) -> Iterator[parquet.ParquetFile]:
    """A .parquet file, open. Raises ValueError (one line) where reading it meets damage."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(source.path, **options) as file:
            yield file
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise ValueError(f"{source.name} is no .parquet file, or it is damaged: {one_line(error)}") from error


def _read_parquet(source: Source, options: ReadOptions, start: Position, limit: int | None) -> Iterator[Chunk]:
    name = options.text_field
    _check_column(source, name)
    # As a dictionary, so that a long value that stands in many rows is in memory once until it is cut to size.
    with _parquet(source, read_dictionary=[name]) as file:
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= start.offset:
                row += rows
                continue
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[name]):
                skip = min(max(0, start.offset - row), batch.num_rows)
                end = batch.num_rows if limit is None else min(batch.num_rows, limit - row)
                row += skip
                for values in _portions(batch.column(0)[skip:end], source, options, row):
                    begin, after = (replace(start, offset=at, line=at + 1) for at in (row, row + len(values)))
                    row = after.offset
                    yield Chunk(source, begin, after, source.bytes * row // max(1, file.metadata.num_rows), values)
                if row == limit:
                    return


def rows_of(source: Source) -> int:
    """Rows of a .parquet file. Raises ValueError if it is none."""
    with _parquet(source) as file:
        return file.metadata.num_rows


def _check_column(source: Source, name: str) -> None:
    """Raises ValueError unless a .parquet file has a column of text under this name."""
    import pyarrow

    with _parquet(source) as file:
        schema = file.schema_arrow
    if name not in schema.names:
        raise ValueError(
            f"{source.name} has no column {name!r}; its columns are {one_line(', '.join(schema.names))} "
            "(choose one with --text-field)"
        )
    kind, types = schema.field(name).type, pyarrow.types
    values = kind.value_type if types.is_dictionary(kind) else kind  # a dictionary is how a categorical column is kept
    if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
        raise ValueError(f"column {name!r} of {source.name} is {kind}, not string")


def _portions(
    values: pyarrow.DictionaryArray, source: Source, options: ReadOptions, row: int
) -> Iterator[list[object]]:
    """Rows in portions of about `CHUNK_BYTES`, `row` rows of the file coming before them."""
    import pyarrow.compute as compute

    lengths = compute.binary_length(values.dictionary).take(values.indices)
    sizes = compute.fill_null(lengths, 1).to_numpy()
    if len(sizes) and sizes.max() > options.longest_line:
        raise _too_long(source.name, f"row {row + int((sizes > options.longest_line).argmax()) + 1}", options)
    begin = size = 0
    for end, length in enumerate(sizes.tolist(), start=1):
        size += length
        if size >= CHUNK_BYTES:
            yield values[begin:end].to_pylist()
            begin, size = end, 0
    if begin < len(sizes):
        yield values[begin:].to_pylist()


def _read_text(source: Source, options: ReadOptions, start: Position, limit: int | None) -> Iterator[Chunk]:
    begin, records, size = start, [], 0
    with source.open(start.offset) as (stream, raw):
        if start.offset == 0 and stream.peek(3)[:3] == _BOM:
            begin = replace(start, offset=len(stream.read(3)))
        # None comes after the last record of the file.
        for record in itertools.chain(_records(stream, source, options, start.line), [None]):
            if record is not None:
                records.append(record)
                size += len(record)
            # Records are read past the end and dropped there, so that they are cut as in a reading without an end.
            last = record is None or (limit is not None and begin.offset + size >= limit)
            if records and (size >= CHUNK_BYTES or last):
                line = begin.line + sum(r.count(b"\n") for r in records)
                end = replace(begin, offset=begin.offset + size, line=line)
                yield Chunk(source, begin, end, source.bytes if record is None else raw.tell(), records)
                begin, records, size = end, [], 0
            if last:
                return


def record_offsets(source: Source, options: ReadOptions) -> Iterator[int]:
    """Where the records of a text file end, in bytes of the decompressed file, by reading all of it."""
    with source.open() as (stream, _):
        offset = len(stream.read(3)) if stream.peek(3)[:3] == _BOM else 0
        for record in _records(stream, source, options, 1):
            offset += len(record)
            yield offset


def next_record(source: Source, options: ReadOptions, offset: int) -> int:
    """Where the first record begins that is sure to begin at or after a byte of an uncompressed text file (its size if
    none does): what stands before `offset` is not read, so of records of several lines one may be passed over."""
    if offset == 0:
        return 0
    with open(source.path, "rb") as file:
        file.seek(offset - 1)
        source = replace(source, name=f"{source.name} from byte {offset - 1:,}")
        rows = _rows(file, source, options, 1)
        position = offset - 1 + len(next(rows, b""))
        if source.kind == "jsonl" or options.text_documents == "line":
            return position
        return position + len(next(_groups(rows, source, options, 1), b""))


def _records(stream: io.BufferedReader, source: Source, options: ReadOptions, line: int) -> Iterator[bytes]:
    """Raw records of a text file; put together they are the file. Raises ValueError at one that is too long."""
    rows = _rows(stream, source, options, line)
    if source.kind == "jsonl" or options.text_documents == "line":
        yield from rows
    elif options.text_documents == "file":
        yield from _whole_file(rows, source, options.max_document_chars, line)
    else:
        yield from _groups(rows, source, options, line)


def _rows(stream: io.BufferedReader, source: Source, options: ReadOptions, line: int) -> Iterator[bytes]:
    """The lines of a text file, none of them longer in memory than it may be."""
    longest = options.longest_line
    while row := stream.readline(longest + 1):
        if len(row) > longest:
            raise _too_long(source.name, f"line {line}", options)
        line += 1
        yield row


def _too_long(name: str, where: str, options: ReadOptions) -> ValueError:
    return ValueError(
        f"{name}, {where}, is longer than {options.max_line_megabytes:g} MiB: the file is damaged or not what it "
        "seems; else raise --max-line-megabytes"
    )


def _groups(rows: Iterable[bytes], source: Source, options: ReadOptions, line: int) -> Iterator[bytes]:
    """Lines up to and with the one that ends a record (of blank lines, the last of a run of them)."""
    paragraphs, mark = options.text_documents == "paragraph", options.document_separator.strip().encode()
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
        if size > options.longest_line:
            raise _too_long(source.name, f"the document that begins at line {line}", options)
        ended = end
    if group:
        yield b"".join(group)


def _whole_file(lines: Iterable[bytes], source: Source, max_chars: int, line: int) -> Iterator[bytes]:
    """The file as one record, or pieces of it of at most `max_chars` characters without holding it whole."""
    limit = max(4 * CHUNK_BYTES, 16 * max_chars) if max_chars else LARGEST_TEXT_DOCUMENT
    rows: list[bytes] = []
    size = 0
    for row in lines:
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
    return [piece.encode("utf-8") for piece in split_text(decode(raw, source.name, line), max_chars)]
