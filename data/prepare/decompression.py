"""Compressed files as streams of bytes."""

from __future__ import annotations

import gzip
import io
import lzma

_BLOCK = 1 << 20
# At once, of compressed zstd: a byte of it makes at most 32 KiB, so this bounds the memory to 64 MiB.
_ZSTD_INPUT = 1 << 11
# For the window of an .xz file: those of `xz -9e` need 65 MiB.
_XZ_MEMORY = 1 << 29


def open_decompressed(raw: io.BufferedReader, compression: str, offset: int) -> io.BufferedReader:
    """The text behind a compression ("" or .gz, .xz, .zst), from a byte offset of the text on.

    Reading it raises EOFError, zlib.error, lzma.LZMAError or gzip.BadGzipFile where the file is damaged.
    """
    if not compression:
        raw.seek(offset)
        return raw
    if compression == ".gz":
        inner = gzip.GzipFile(fileobj=raw)
    elif compression == ".xz":
        inner = _XzFile(raw)
    else:
        inner = _ZstdFile(raw)
    stream = io.BufferedReader(inner, _BLOCK)
    while offset > 0:
        skipped = len(stream.read(min(offset, _BLOCK)))
        if not skipped:
            raise EOFError("it is shorter than before")
        offset -= skipped
    return stream


class _XzFile(io.RawIOBase):
    """Streams of .xz in a row, with a bound on the memory (the library's own reader has none)."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        self._decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while True:
            if self._decoder.eof:
                # Between streams zeros may stand.
                rest = self._decoder.unused_data.lstrip(b"\0")
                while not rest and (chunk := self._raw.read(1 << 16)):
                    rest = chunk.lstrip(b"\0")
                if not rest:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
            else:
                rest = self._raw.read(1 << 16) if self._decoder.needs_input else b""
                if self._decoder.needs_input and not rest:
                    raise EOFError("the file ends inside a compressed stream")
            if output := self._decoder.decompress(rest, max_length=len(buffer)):
                buffer[: len(output)] = output
                return len(output)


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
            self._input = self._input or self._raw.read(_ZSTD_INPUT)
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
