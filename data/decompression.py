"""Compressed files as streams of bytes."""

from __future__ import annotations

import gzip
import io
import lzma

_BLOCK = 1 << 20


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
