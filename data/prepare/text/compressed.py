"""Reads compressed texts: .gz, .xz and .zst files, also of several frames in a row, with bounded memory."""

import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zstandard

_BLOCK = 1 << 20
# Compressed bytes that are read at once. One of zstd makes up to 32 KiB, of .xz 7, of gzip 1: this bounds the memory.
_COMPRESSED_BLOCK = 1 << 11
# The largest window: `zstd --long=31` and `xz --lzma2=dict=1536MiB` ask for that (`xz -9e` needs 65 MiB). Its pages
# that hold no text yet take no memory.
_WINDOW_MEMORY = 1 << 31

DECODERS: dict[str, tuple[Callable[[], Any], bytes]] = {
    ".gz": (lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), b"\0"),
    ".xz": (lambda: lzma.LZMADecompressor(memlimit=_WINDOW_MEMORY), b"\0"),
    ".zst": (lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW_MEMORY).decompressobj(), b""),
}
"""Suffix -> a function that makes the decompressor of one frame, and the bytes that may stand between frames."""


@contextmanager
def open_text(
    path: str, compression: str, offset: int, name: str
) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """Opens a text, from a byte offset on, and the file on the disk. compression: its suffix or "". Raises ValueError
    (one line, with `name`) where reading it meets damage."""
    try:
        with open(path, "rb") as raw:
            if not compression:
                raw.seek(offset)
                yield raw, raw
                return
            text = io.BufferedReader(_Frames(raw, compression), _BLOCK)
            while offset > 0:
                skipped = len(text.read(min(offset, _BLOCK)))
                if not skipped:
                    raise EOFError("it is shorter than before")
                offset -= skipped
            yield text, raw
    except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise ValueError(f"{name} is damaged, or no {compression.removeprefix('.')} file: {error}") from error


class _Frames(io.RawIOBase):
    """Reads compressed frames in a row. It bounds the memory, unlike the reader of lzma, and refuses a frame that ends
    early, unlike that of zstandard."""

    def __init__(self, raw: io.BufferedReader, compression: str) -> None:
        self._raw, (self._new, self._padding) = raw, DECODERS[compression]
        # An empty file is an empty text of gzip and zstd, but damaged .xz.
        self._decoder = self._new() if compression == ".xz" else None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_COMPRESSED_BLOCK)
            if not self._input:
                if self._decoder is not None:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            if self._decoder is None:
                self._input = self._input.lstrip(self._padding)
                if not self._input:
                    continue
                self._decoder = self._new()
            self._output = self._decoder.decompress(self._input)
            self._input = b""
            if self._decoder.eof:
                self._input, self._decoder = self._decoder.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
