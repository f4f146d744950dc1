"""Reads text files as a stream of chunks of raw records, from any position, and cuts the stream into parts.

The records of a source are lines (.jsonl), documents (.txt) or rows (.parquet). Reading cuts them into chunks of about
`CHUNK_BYTES`, which other processes turn into documents (documents.py). A position in a text is a byte offset in the
decompressed file, so that reading can continue there.

For parts, the input counts as one line of bytes, all files one after another, cut at k/n of its length; each cut then
moves to where a record begins. A file that can be entered anywhere (lines of uncompressed text, rows of a .parquet
file) is cut at the next record. One that can only be read from its beginning (compressed text, or a text that is cut
into pieces of `max_document_chars`) stays whole in one part unless it is larger than a part; then it is read through
once to find its records. So the cuts follow from the input, its options and n, and parts in order give the documents in
order.
"""

from __future__ import annotations

import io
import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from matmix.data.artifacts import one_line
from matmix.data.prepare.base import Chunk, Position, open_parquet
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import decode, split_text
from matmix.data.prepare.text.sources import BOM, TextFile

if TYPE_CHECKING:
    import pyarrow

CHUNK_BYTES = 1 << 20
# A .txt file that is one document is read and tokenised in one piece; a larger one would need gigabytes of memory.
LARGEST_TEXT_DOCUMENT = 1 << 26
# Bytes of a text that is read through, for each of which at most one end of a record is remembered.
REMEMBERED_BYTES = 1 << 16


def read_chunks(
    sources: Sequence[TextFile], options: ReadOptions, start: Position | None = None, stop: Position | None = None
) -> Iterator[Chunk]:
    """Yields chunks of all sources in order, from a position on and up to another (where a record begins).

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


def _read_parquet(source: TextFile, options: ReadOptions, start: Position, limit: int | None) -> Iterator[Chunk]:
    name = options.text_field
    _check_column(source, name)
    # As a dictionary, so that a long value that stands in many rows is in memory once until it is cut to size.
    with open_parquet(source.path, source.name, read_dictionary=[name]) as file:
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


def _check_column(source: TextFile, name: str) -> None:
    """Raises ValueError unless a .parquet file has a column of text under this name."""
    import pyarrow

    with open_parquet(source.path, source.name) as file:
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
    values: pyarrow.DictionaryArray, source: TextFile, options: ReadOptions, row: int
) -> Iterator[list[object]]:
    """Yields rows in portions of about `CHUNK_BYTES`; `row` rows of the file come before them."""
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


def _read_text(source: TextFile, options: ReadOptions, start: Position, limit: int | None) -> Iterator[Chunk]:
    begin, records, size = start, [], 0
    with source.open(start.offset) as (stream, raw):
        if start.offset == 0 and stream.peek(3)[:3] == BOM:
            size = len(stream.read(3))
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


def record_offsets(source: TextFile, options: ReadOptions) -> Iterator[int]:
    """Yields where the records of a text file end, in bytes of the decompressed file, by reading all of it."""
    with source.open() as (stream, _):
        offset = len(stream.read(3)) if stream.peek(3)[:3] == BOM else 0
        for record in _records(stream, source, options, 1):
            offset += len(record)
            yield offset


def next_record(source: TextFile, options: ReadOptions, offset: int) -> int:
    """Returns where the first record begins that surely begins at or after a byte of an uncompressed text (its size if
    none does). What stands before `offset` is not read, so that one record of several lines may be passed over."""
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


def _records(stream: io.BufferedReader, source: TextFile, options: ReadOptions, line: int) -> Iterator[bytes]:
    """Yields the raw records of a text file; joined, they are the file. Raises ValueError at one that is too long."""
    rows = _rows(stream, source, options, line)
    if source.kind == "jsonl" or options.text_documents == "line":
        yield from rows
    elif options.text_documents == "file":
        yield from _whole_file(rows, source, options.max_document_chars, line)
    else:
        yield from _groups(rows, source, options, line)


def _rows(stream: io.BufferedReader, source: TextFile, options: ReadOptions, line: int) -> Iterator[bytes]:
    """Yields the lines of a text file. Raises ValueError at one that is too long."""
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


def _groups(rows: Iterable[bytes], source: TextFile, options: ReadOptions, line: int) -> Iterator[bytes]:
    """Yields records that end with a separator, or with the last blank line of a run of them."""
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


def _whole_file(lines: Iterable[bytes], source: TextFile, max_chars: int, line: int) -> Iterator[bytes]:
    """Yields the file as one record, or in pieces of at most `max_chars` characters without holding it whole."""
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


def _pieces(raw: bytes, source: TextFile, max_chars: int, line: int) -> list[bytes]:
    return [piece.encode("utf-8") for piece in split_text(decode(raw, source.name, line), max_chars)]


def find_cuts(sources: Sequence[TextFile], options: ReadOptions, parts: int) -> list[Position]:
    """Returns parts + 1 positions: part k, counted from 1, lies between positions k - 1 and k.

    Raises ValueError as reading does.
    """
    starts = [0, *itertools.accumulate(s.bytes for s in sources)]
    total, share = starts[-1], -(-starts[-1] // parts)
    wanted: dict[int, list[int]] = {}
    cuts = [Position()]
    for number in range(1, parts):
        place = total * number // parts
        index = bisect_right(starts, place) - 1
        wanted.setdefault(min(index, len(sources) - 1), []).append(place - starts[index])
    for index, places in wanted.items():
        for offset in _cut(sources[index], options, places, share):
            cuts.append(Position(source=index + 1) if offset is None else Position(source=index, offset=offset))
    return [*cuts, Position(source=len(sources))]


def _cut(source: TextFile, options: ReadOptions, places: Sequence[int], share: int) -> list[int | None]:
    """Returns the offsets of records to cut at for ascending places in the file's bytes; None for its end."""
    if source.kind == "parquet":
        rows = source.end
        return [row if row < rows else None for row in (rows * place // max(1, source.bytes) for place in places)]
    whole = source.kind == "txt" and options.text_documents == "file"
    if not whole and not source.compression:
        offsets = [next_record(source, options, place) for place in places]
        return [offset if offset < source.bytes else None for offset in offsets]
    if source.bytes <= share or (whole and not options.max_document_chars):
        return [0 if 2 * place < source.bytes else None for place in places]
    ends, last = array("q"), 0
    for last in record_offsets(source, options):
        if last - (ends[-1] if ends else 0) >= REMEMBERED_BYTES:
            ends.append(last)
    ends.insert(0, 0)
    chosen = [bisect_left(ends, last * place // source.bytes) for place in places]
    return [ends[i] if i < len(ends) and ends[i] < last else None for i in chosen]
