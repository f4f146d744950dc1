"""Reads a .txt or .jsonl file as a stream of chunks of raw records, from any position.

Records are lines (.jsonl) or documents (.txt); a position is a byte offset in the decompressed file. A file that can be
entered anywhere (lines of uncompressed text) is cut into parts at the next record. One that can only be read from its
beginning (compressed, or cut into pieces of `max_document_chars`) stays whole in one part unless it is larger than a
part; then it is read through once to find its records.
"""

from __future__ import annotations

import io
import itertools
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

from matmix.data.artifacts import parse_json
from matmix.data.prepare.base import Chunk, Position
from matmix.data.prepare.text import sources
from matmix.data.prepare.text.compressed import open_text
from matmix.data.prepare.text.documents import decode, split_text, strings_in
from matmix.data.prepare.text.sources import TextSource

BOM = b"\xef\xbb\xbf"
# A .txt file that is one document is read and tokenised in one piece; a larger one would need gigabytes of memory.
LARGEST_TEXT_DOCUMENT = 1 << 26
# Bytes of a text that is read through, for each of which at most one end of a record is remembered.
REMEMBERED_BYTES = 1 << 16


@dataclass(frozen=True)
class TextFile(TextSource):
    """A .txt or .jsonl file, which may be compressed."""

    kind: Literal["txt", "jsonl", "fastq"]
    compression: str
    """"" or the suffix .gz, .xz, .zst."""

    @property
    def takes(self) -> Collection[str]:
        return ("text_documents", "document_separator") if self.kind == "txt" else super().takes

    @property
    def end(self) -> int | None:
        # A file of a byte order mark alone has no records.
        return None if self.compression or self.bytes <= len(BOM) else self.bytes

    @property
    def _records_are(self) -> str:
        return "line" if self.kind == "jsonl" else self.options.text_documents

    def open(self, offset: int = 0) -> AbstractContextManager[tuple[io.BufferedReader, io.BufferedReader]]:
        """Opens the text, from a byte offset on, and the file on the disk, which may be compressed."""
        return open_text(self.path, self.compression, offset, self.name)

    def chunks(self, start: Position, stop: int | None) -> Iterator[Chunk]:
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
                if records and (size >= sources.CHUNK_BYTES or last):
                    line = begin.line + sum(r.count(b"\n") for r in records)
                    end = replace(begin, offset=begin.offset + size, line=line)
                    yield Chunk(self, begin, end, self.bytes if record is None else raw.tell(), records)
                    begin, records, size = end, [], 0
                if last:
                    return

    def texts(self) -> Iterator[str]:
        if self.kind != "jsonl":
            yield from super().texts()
            return
        with self.open() as (stream, _):
            for number, row in enumerate(self._rows(stream, 1), start=1):
                if row := row.removeprefix(BOM).strip():
                    yield from strings_in(parse_json(row, f"line {number} of {self.name}"))

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
                raise self.too_long(f"line {line}")
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
                raise self.too_long(f"the document that begins at line {line}")
            ended = end
        if group:
            yield b"".join(group)

    def _whole_file(self, lines: Iterable[bytes], line: int) -> Iterator[bytes]:
        """Yields the file as one record, or in pieces of `max_document_chars` without holding it whole."""
        longest = self.options.max_document_chars
        limit = max(4 * sources.CHUNK_BYTES, 16 * longest) if longest else LARGEST_TEXT_DOCUMENT
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

    # -- parts -------------------------------------------------------------------------------------------------------

    def cut(self, places: Sequence[int], share: int) -> list[int | None]:
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
