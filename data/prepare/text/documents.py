"""Turns raw records into documents: decodes JSON and UTF-8, finds malformed records, and cuts long documents."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from matmix.data.prepare.base import Chunk, Malformed
from matmix.data.prepare.text import ReadOptions

MISSING = object()


def documents_of(chunk: Chunk) -> Iterator[str | bytearray | Malformed]:
    """Yields the documents of a chunk in order, "" for one of white space only; of raw bytes, a bytearray. Blank lines
    of .jsonl files give none. Raises ValueError at bytes that are not UTF-8, with file, line and byte."""
    options, line = chunk.source.options, chunk.start.line
    # Bytes are a line or text of a file, (key, members) a sample of a tar file, other tuples the row of a table.
    for record in chunk.records:
        if isinstance(record, (str, bytearray)):  # a document as it stands
            yield record
            continue
        if isinstance(record, bytes):
            text, line = _text_of_bytes(record, chunk, options, line), line + record.count(b"\n")
        elif isinstance(record[-1], dict):
            text, line = text_of_sample(*record, options, line), line + 1
        else:
            values = ["" if value is None else value for value in record]  # null is no text
            text, line = _joined(values, options, "column", line), line + 1
        if isinstance(text, Malformed):
            yield text
        elif text is not None:
            longest = options.max_document_chars
            pieces = split_text(text, longest) if longest and text.strip() else [text]
            yield from (piece if piece.strip() else "" for piece in pieces)


def _text_of_bytes(raw: bytes, chunk: Chunk, options: ReadOptions, line: int) -> str | Malformed | None:
    text = decode(raw, chunk.source.name, line)
    if chunk.source.kind == "jsonl":
        return _text_of_json(text, options, line) if text.strip() else None
    if chunk.source.kind == "fastq":
        return text.split("\n")[1].strip() if text.strip() else None
    text = text.replace("\r\n", "\n")
    if options.text_documents == "paragraph":
        return text.rstrip()
    if options.text_documents == "separator":
        *rows, last = text.rstrip("\n").split("\n")
        text = "\n".join(rows if last.strip() == options.document_separator.strip() else [*rows, last])
    return text if options.text_documents == "file" else text.strip("\n")


def _text_of_json(text: str, options: ReadOptions, line: int) -> str | Malformed:
    try:
        value = json.loads(text.removeprefix("\ufeff"))  # a byte order mark inside: files put together by `cat`
    except (ValueError, RecursionError) as error:
        return Malformed(line, f"not JSON ({error})")
    if not isinstance(value, dict):
        return Malformed(line, f"not a JSON object but {type(value).__name__}")
    values = [field_of(value, name) for name in options.fields]
    for name, found in zip(options.fields, values, strict=True):
        if found is MISSING:
            return Malformed(line, f"no field {name!r} (its fields: {', '.join(list(value)[:8]) or 'none'})")
    return _joined(values, options, "field", line)


def text_of_sample(key: str, members: dict[str, bytes], options: ReadOptions, line: int) -> str | Malformed:
    """Returns the text of a sample of a tar file: a field is a member by its suffix, or a field of the member .json."""
    names = ["txt" if name == "text" and "text" not in members else name for name in options.fields]
    fields, values = {}, []
    if "json" in members and any(name not in members for name in names):
        try:
            fields = json.loads(members["json"])
        except (ValueError, RecursionError) as error:
            return Malformed(line, f"sample {key}: its member .json is not JSON ({error})")
        if not isinstance(fields, dict):
            return Malformed(line, f"sample {key}: its member .json is no object but {type(fields).__name__}")
    for member, name in zip(names, options.fields, strict=True):
        value = (
            members[member] if member in members else field_of(fields, name) if isinstance(fields, dict) else MISSING
        )
        if value is MISSING:
            known = ", ".join([*members, *(f"{field} in .json" for field in list(fields)[:8])])
            return Malformed(line, f"sample {key} has no member or field {member!r} (it has: {known})")
        values.append(value)
    return _joined(values, options, "member", line)


def field_of(value: dict[str, Any], name: str) -> object:
    """Returns a field of an object or, as `field.inner`, of an object in it; `MISSING` where there is none."""
    if name in value:
        return value[name]
    outer, _, inner = name.partition(".")
    below = value.get(outer)
    return field_of(below, inner) if inner and isinstance(below, dict) else MISSING


def _joined(values: Sequence[object], options: ReadOptions, kind: str, line: int) -> str | Malformed:
    """Returns the text of the values of `options.fields`."""
    texts = []
    for name, value in zip(options.fields, values, strict=True):
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as error:
                return Malformed(line, f"{kind} {name!r} is not UTF-8 (byte {error.start + 1})")
        if not isinstance(value, str):
            return Malformed(line, f"{kind} {name!r} is {type(value).__name__}, not text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return Malformed(line, f"{kind} {name!r} holds half of a surrogate pair, which is no character")
        texts.append(value)
    if not options.template:
        return texts[0]
    return options.fill(texts) if any(text.strip() for text in texts) else ""


def strings_in(value: object) -> Iterator[str]:
    """Yields the texts in a value of JSON or of a table. Half a surrogate pair is no character, and left out."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one.encode("utf-8", "ignore").decode("utf-8")
        elif isinstance(one, dict | list | tuple):
            left.extend(one.values() if isinstance(one, dict) else one)


def decode(raw: bytes, name: str, first_line: int) -> str:
    """Returns the text of bytes that begin at line `first_line` of a file. Raises ValueError if they are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise ValueError(
            f"{name} is not UTF-8: line {line}, byte {column} of the line is 0x{raw[error.start]:02x}; "
            "convert the file (for example with iconv)"
        ) from None


def split_text(text: str, max_chars: int) -> list[str]:
    """Cuts a text into pieces of at most `max_chars` characters; joined, they are the text. Each cut is the last one
    possible: after a blank line, or else a line, or else a space, or else anywhere. A kind of cut that would leave less
    than a quarter of `max_chars` gives way to the next kind."""
    pieces: list[str] = []
    start = 0
    while len(text) - start > max_chars:
        window = text[start : start + max_chars]
        ends = (
            max((at + len(mark) for mark in marks if (at := window.rfind(mark)) >= 0), default=0)
            for marks in (("\n\n", "\n\r\n"), ("\n",), (" ",))
        )
        cut = next((end for end in ends if end >= max(1, max_chars / 4)), max_chars)
        pieces.append(window[:cut])
        start += cut
    if start < len(text) or not pieces:
        pieces.append(text[start:])
    return pieces
