"""The base classes of sources of text: a file, and a file whose records are rows of columns."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from matmix.data.artifacts import errors_in_one_line, one_line
from matmix.data.prepare.base import Chunk, Position, Source
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import documents_of, strings_in

if TYPE_CHECKING:
    import pyarrow

CHUNK_BYTES = 1 << 20
_BATCH = 1024


@dataclass(frozen=True)
class TextSource(Source):
    """One input file of text."""

    name: str
    path: str
    bytes: int
    options: ReadOptions

    @property
    def takes(self) -> Collection[str]:
        """Those of the options in `readers.OF_SOME` that decide how it is read."""
        return ("text_field", "template")

    def too_long(self, where: str) -> ValueError:
        return ValueError(
            f"{self.name}, {where}, is longer than {self.options.max_line_megabytes:g} MiB: the file is damaged or not "
            "what it seems; else raise --max-line-megabytes"
        )

    def texts(self) -> Iterator[str]:
        """Yields every text in it, in whatever field of objects and rows. Raises ValueError (one line) for damage."""
        for chunk in self.chunks(Position(), None):
            yield from (one for one in documents_of(chunk) if isinstance(one, str))


class Rows(TextSource):
    """A file of rows. A record is the tuple of one row's values in the columns that the options name, each str, None,
    or bytes of a text; or a document as it stands, str or bytearray."""

    @abc.abstractmethod
    def portions(self, start: int, stop: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yields rows `start` to `stop` in portions of about `CHUNK_BYTES`. Raises ValueError (one line)."""

    def chunks(self, start: Position, stop: int | None) -> Iterator[Chunk]:
        rows, row = self.end, start.offset
        for records in self.portions(row, rows if stop is None else stop):
            begin, end = (replace(start, offset=at, line=at + 1) for at in (row, row + len(records)))
            row = end.offset
            yield Chunk(self, begin, end, self.bytes * row // max(1, rows), records)

    def cut(self, places: Sequence[int], share: int) -> list[int | None]:
        rows = self.end
        cuts = [rows * place // max(1, self.bytes) for place in places]
        return [row if row < rows else None for row in cuts]

    def gathered(self, records: Iterable[tuple[Any, ...]], row: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yields records in portions. `row` rows of the file come before them."""
        portion, size = [], 0
        for number, record in enumerate(records, start=row + 1):
            length = sum(map(len, record))
            if length > self.options.longest_line:
                raise self.too_long(f"row {number}")
            portion.append(record)
            size += length
            if size >= CHUNK_BYTES:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion

    def unknown_column(self, name: str, columns: Iterable[str]) -> ValueError:
        known = one_line(", ".join(columns))
        return ValueError(f"{self.name} has no column {name!r}; its columns are {known} (choose one with --text-field)")

    def no_text(self, name: str, kind: str, columns: Iterable[str]) -> ValueError:
        known = one_line(", ".join(columns)) or "none"
        return ValueError(f"column {name!r} of {self.name} is {one_line(kind)}, not string; those of text are: {known}")


class Table(Rows):
    """Rows that pyarrow reads."""

    @abc.abstractmethod
    def schema(self) -> pyarrow.Schema:
        """Returns the columns. Raises ValueError (one line) for a damaged file."""

    def texts_of(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[str]:
        """Yields every text in batches, for `texts`."""
        for batch in batches:
            kept = batch.select([field.name for field in batch.schema if _holds_text(field.type)])
            kept.validate(full=True)  # offsets of a foreign file may lead anywhere
            for begin in range(0, kept.num_rows, _BATCH):
                with errors_in_one_line(OverflowError):  # a date of which Python has none
                    rows = kept.slice(begin, _BATCH).to_pylist()
                yield from strings_in(rows)

    def check_columns(self) -> None:
        """Raises ValueError unless the columns that the options name are there and hold text."""
        schema = self.schema()
        leaves = dict(_leaves(schema))
        texts = [name for name, kind in leaves.items() if _is_text(kind)]
        for name in self.options.fields:
            if name not in leaves:
                raise self.unknown_column(name, schema.names if "." not in name else leaves)
            if not _is_text(leaves[name]):
                raise self.no_text(name, str(leaves[name]), texts)
            if schema.names.count(place_of(name, schema.names)[0]) > 1:
                raise ValueError(f"{self.name} has several columns {name!r}, of which one is meant: rename them")

    def rows_of(self, batch: pyarrow.RecordBatch, row: int, start: int, stop: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows of a batch that are wanted, in portions. `row` rows of the file come before the batch."""
        import pyarrow.compute as compute

        for begin in range(max(0, start - row), min(batch.num_rows, stop - row), _BATCH):
            values = batch.slice(begin, min(_BATCH, stop - row - begin))
            columns = [_column(values, name) for name in self.options.fields]
            lengths = (compute.fill_null(_lengths(column), 1).to_numpy(zero_copy_only=False) for column in columns)
            sizes = sum(length.astype(np.int64) for length in lengths)
            if (sizes > self.options.longest_line).any():
                raise self.too_long(f"row {row + begin + int((sizes > self.options.longest_line).argmax()) + 1}")
            first = size = 0
            for end, length in enumerate(sizes.tolist(), start=1):
                size += length
                if size >= CHUNK_BYTES or end == len(sizes):
                    yield list(zip(*(_values(column[first:end]) for column in columns), strict=True))
                    first, size = end, 0


def _values(column: pyarrow.Array) -> list[str | bytes | None]:
    """Returns the texts of a column; bytes, which tell the reader of the documents what they are, where any of them is
    no UTF-8."""
    import pyarrow

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        plain = column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
        return plain.cast(pyarrow.large_binary()).to_pylist()


def _leaves(schema: pyarrow.Schema, depth: int = 32) -> Iterator[tuple[str, pyarrow.DataType]]:
    """Yields the names and types of columns and, as `column.field`, of what is nested in them, not deeper than that."""
    import pyarrow

    nested = []
    for field in schema:
        yield field.name, field.type
        nested += [(field.name, field.type)] if depth and pyarrow.types.is_struct(field.type) else []
    for name, kind in nested:  # at the end: a column of the same name goes first
        inner = pyarrow.schema([kind.field(i) for i in range(kind.num_fields)])
        below = ((f"{name}.{inside}", type_) for inside, type_ in _leaves(inner, depth - 1))
        yield from (leaf for leaf in below if leaf[0] not in schema.names)


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow

    types = pyarrow.types
    values = kind.value_type if types.is_dictionary(kind) else kind  # how a categorical column is kept
    return types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)


def _holds_text(kind: pyarrow.DataType) -> bool:
    return _is_text(kind) or any(_holds_text(kind.field(i).type) for i in range(kind.num_fields))


def place_of(name: str, columns: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the column that `column.field` means, the one with the longest name, and the fields inside of it."""
    parts = name.split(".")
    used = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in columns)
    return ".".join(parts[:used]), parts[used:]


def _column(batch: pyarrow.RecordBatch, name: str) -> pyarrow.Array:
    """Returns a column, or what is nested in it; where the column is null, so is that."""
    import pyarrow.compute as compute

    column, inside = place_of(name, batch.schema.names)
    values = batch.column(batch.schema.get_field_index(column))
    return compute.struct_field(values, inside) if inside else values


def _lengths(column: pyarrow.Array) -> pyarrow.Array:
    """Returns the bytes of each value, without making values of a dictionary anew."""
    import pyarrow
    import pyarrow.compute as compute

    if pyarrow.types.is_dictionary(column.type):
        return compute.binary_length(_plain(column.dictionary)).take(column.indices)
    return compute.binary_length(_plain(column))


def _plain(column: pyarrow.Array) -> pyarrow.Array:
    """Returns the column in a type of which lengths can be computed."""
    import pyarrow

    return column.cast(pyarrow.large_string()) if pyarrow.types.is_string_view(column.type) else column
