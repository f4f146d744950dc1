"""The texts in the files that a command names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, BinaryIO, Literal

import tyro
from tqdm import tqdm

from matmix.data.prepare.base import Malformed
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import decode, documents_of
from matmix.data.prepare.text.readers import read_chunks
from matmix.data.prepare.text.sources import find_sources

TextFiles = Annotated[
    tyro.conf.Positional[tuple[str, ...]],
    tyro.conf.arg(
        metavar="FILE",
        help="Text as `matmix prepare` takes it: .txt, .jsonl (also .gz .xz .zst), .parquet, folders, globs.",
    ),
]
TextDocuments = Literal["file", "paragraph", "line"]


def read_texts(files: Sequence[str], *, text_field: str, text_documents: TextDocuments, doing: str) -> Iterator[str]:
    """Every document of the files in order, "" for one of white space only; on terminals with a progress bar.

    text_field, text_documents: as of `matmix prepare`; doing: what the bar says. Raises ValueError and
    FileNotFoundError (one line) for files that cannot be read, and for records that hold no text.
    """
    if not files:
        raise ValueError("name the files with the text")
    sources, _ = find_sources(files)
    options = ReadOptions(text_field=text_field, text_documents=text_documents)
    before = [0, *itertools.accumulate(source.bytes for source in sources)]
    with tqdm(total=before[-1], desc=doing, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for chunk in read_chunks(sources, options):
            for text in documents_of(chunk, options):
                if isinstance(text, Malformed):
                    raise ValueError(f"{chunk.source.name}, line {text.line}: {text.reason}")
                yield text
            bar.update(before[chunk.start.source] + chunk.disk_bytes - bar.n)


def read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a stream of UTF-8, such as standard input. Raises ValueError (one line) at other bytes."""
    for number, line in enumerate(file, 1):
        text = decode(line, name, number).rstrip("\r\n")
        yield text.removeprefix("\ufeff") if number == 1 else text
