"""Reads the columns of example files: .tsv, .csv, .jsonl, .parquet, and folders of text files by class."""

import csv
import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from matmix.data.artifacts import errors_in_one_line, one_line, parse_json
from matmix.data.config import ExamplesConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some columns of a file, by what they are to the task."""

    path: Path
    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int]
    """Number of each row in the file, from 1 on, for errors."""
    left_out: int = 0
    """Rows that were left out as malformed."""

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, row: int) -> str:
        """Returns the row as errors name it."""
        return f"{self.path}, row {self.lines[row]}"

    @property
    def digest(self) -> str:
        """A digest of all that the rows hold, whatever path they lie at."""
        digest = hashlib.sha256()
        for name, values in sorted(self.columns.items()):
            digest.update(repr((name, list(values))).encode())
        return digest.hexdigest()[:16]


@errors_in_one_line(csv.Error, pyarrow.ArrowException)
def read_rows(
    path: str,
    config: ExamplesConfig,
    needed: Sequence[str],
    optional: Sequence[str] = (),
    *,
    filled: Sequence[str] = (),
) -> Rows:
    """Returns the columns of the file that `config.columns` gives to the names in `needed`, and to those in `optional`
    that it has. filled: names of those in which a blank text is no value, but a missing one.

    Raises FileNotFoundError where there is no such file, ValueError (one line) for one that cannot be read, is empty or
    lacks a column. A warning says how many rows were left out as malformed, where that is allowed.
    """
    names = {role: config.columns.get(role, role) for role in (*needed, *optional)}
    for role in config.columns:
        if role not in names:
            raise ValueError(f"data.examples.columns names {role}, which this task does not read: {', '.join(names)}")
    if not Path(path).exists():
        raise FileNotFoundError(f"examples not found: {path}")
    form = _Form(config.header, config.skip_malformed, config.more_fields)
    inside = Path(path).rglob("*") if Path(path).is_dir() else ()
    changed = max([Path(path).stat().st_mtime_ns, *(one.lstat().st_mtime_ns for one in inside)])
    return _read(Path(path), changed, tuple(names.items()), frozenset(needed), frozenset(filled), form)


@dataclass(frozen=True, slots=True)
class _Form:
    """The form that .tsv and .csv files may have, as `ExamplesConfig` says."""

    header: bool
    skip_malformed: bool
    more_fields: bool


@functools.lru_cache(maxsize=8)  # training reads a file for its rows, validation for its labels
def _read(
    path: Path,
    changed: int,
    names: tuple[tuple[str, str], ...],
    needed: frozenset[str],
    filled: frozenset[str],
    form: _Form,
) -> Rows:
    """Reads a file. changed: when the file was, so that a newer one is read again."""
    kind = "" if path.is_dir() else path.suffix
    if kind not in _READERS:
        known = ", ".join(filter(None, _READERS))
        raise ValueError(f"{path} is no file of examples: give {known}, or a folder with a folder for each class")
    asked = {role: [part.strip() for part in name.split(",")] for role, name in names}
    wanted = {part for parts in asked.values() for part in parts}
    there, records = _READERS[kind](path, form, wanted)
    if doubled := [name for name in there if name in wanted and there.count(name) > 1]:
        raise ValueError(f'{path} has several columns "{doubled[0]}", of which one is meant: rename them')
    parts_of = {}
    for role, parts in asked.items():
        if missing := [part for part in parts if part not in there]:
            if role not in needed:
                continue
            has = ", ".join(there) or "none"
            hint = f'columns = {{{role} = "..."}} in [data.examples] says which one holds it'
            raise ValueError(f'{path} has no column "{missing[0]}" (it has {has}); {hint}')
        parts_of[role] = parts
    columns: dict[str, list[Any]] = {role: [] for role in parts_of}
    lines, left_out = [], []
    for line, record in records:
        if record is None:
            left_out.append(line)
            continue
        lines.append(line)
        for role, parts in parts_of.items():
            values = [record.get(part) for part in parts]
            if role in filled:
                values = [None if isinstance(value, str) and not value.strip() else value for value in values]
            if values[0] is None and role in needed:
                raise ValueError(f"{path}, row {line}: no {parts[0]}")
            columns[role].append(values[0] if len(parts) == 1 else values)
    if not lines:
        raise ValueError(f"{path} holds no examples")
    if left_out:
        _warn_once(
            f"{path}: {len(left_out):,} of {len(lines) + len(left_out):,} rows have another number of fields than the "
            f"first and are left out (the first of them: row {left_out[0]})"
        )
    return Rows(path, columns, lines, len(left_out))


@functools.cache  # a file is read for several ends
def _warn_once(words: str) -> None:
    logger.warning(words)


_Records = tuple[Sequence[str], Iterator[tuple[int, Mapping[str, Any] | None]]]
"""Names of the columns, and number and fields of each row; None for one that is to be left out."""


def _delimited(delimiter: str, path: Path, form: _Form, wanted: Set[str]) -> _Records:
    """Reads lines. .csv has quotes, .tsv has none: a quotation mark in it is one. Raises ValueError (one line) for a
    quote that does not end with its field, which would swallow the rows after it."""
    csv.field_size_limit(sys.maxsize)
    quotes = delimiter == ","
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    lines = csv.reader(_text_lines(path), delimiter=delimiter, quoting=quoting, strict=quotes)

    def read() -> Iterator[list[str]]:
        while True:
            begin = lines.line_num + 1
            try:
                fields = next(lines, None)
            except csv.Error as error:
                raise ValueError(
                    f"{path}, row {begin}: a quotation mark is not closed, or text follows it ({error}); double those "
                    "that belong to the text"
                ) from None
            if fields is None:
                return
            yield fields

    found = read()
    if (first := next(found, None)) is None:
        raise ValueError(f"{path} is empty")
    names = first if form.header else [str(number) for number in range(len(first))]

    def records() -> Iterator[tuple[int, Mapping[str, Any] | None]]:
        if not form.header:
            yield lines.line_num, dict(zip(names, first, strict=True))
        for fields in found:
            if len(fields) == len(names) or (form.more_fields and len(fields) > len(names)):
                yield lines.line_num, dict(zip(names, fields, strict=False))
            elif fields and form.skip_malformed:
                yield lines.line_num, None
            elif fields:
                raise ValueError(
                    f"{path}, row {lines.line_num}: {len(fields)} fields instead of {len(names)}; mend it, or set "
                    "data.examples.skip_malformed = true"
                )

    return names, records()


def _text_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error})") from None


def _jsonl(path: Path, form: _Form, wanted: Set[str]) -> _Records:
    records = []
    for number, line in enumerate(_text_lines(path), start=1):
        if line.strip():
            record = parse_json(line, f"{path}, row {number}")
            if not isinstance(record, dict):
                raise ValueError(f"{path}, row {number}: not a JSON object")
            records.append((number, record))
    if not records:
        raise ValueError(f"{path} is empty")
    return list(dict.fromkeys(name for _, record in records for name in record)), iter(records)


def _parquet(path: Path, form: _Form, wanted: Set[str]) -> _Records:
    """Reads no other columns, in which may be what Python has no value for."""
    try:
        file = pyarrow.parquet.ParquetFile(path)
        there = file.schema_arrow.names
        rows = file.read([name for name in there if name in wanted]).to_pylist()
        return there, enumerate(rows, start=1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds text that is not UTF-8 ({error.reason})") from None
    except OverflowError as error:  # a date of which Python has none
        raise ValueError(f"{path}: {error}") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no parquet file, or it is damaged ({one_line(str(error).strip())})") from None


def _folder(path: Path, form: _Form, wanted: Set[str]) -> _Records:
    classes = sorted(entry for entry in path.iterdir() if entry.is_dir())
    files = [(entry.name, file) for entry in classes for file in sorted(entry.iterdir()) if file.is_file()]
    records = ({"text": "".join(_text_lines(file)), "label": name} for name, file in files)
    return ("text", "label"), enumerate(records, start=1)


_READERS: dict[str, Callable[[Path, _Form, Set[str]], _Records]] = {
    ".tsv": functools.partial(_delimited, "\t"),
    ".csv": functools.partial(_delimited, ","),
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    "": _folder,
}
"""Suffix -> reader of a file, in a form, and of those columns at least that are wanted; "" = a folder."""
