"""Pictures as documents: an encoded picture and the number of its class, in one array of bytes.

A dataset whose dtype is uint8 holds such documents. A document is the bytes of the file, then the class as int64
(little-endian); its length counts both. This is how MDS lays out a sample with the columns `image` and `label`, so
that a document is a view of the shard there.
"""

from __future__ import annotations

import numpy as np

PICTURES = np.dtype("uint8")
LABEL_BYTES = 8

_KINDS = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)


def pack(picture: bytes, label: int) -> np.ndarray:
    """The document of an encoded picture and its class, uint8 (n,)."""
    return np.frombuffer(picture + int(label).to_bytes(LABEL_BYTES, "little", signed=True), PICTURES)


def unpack(document: np.ndarray) -> tuple[memoryview, int]:
    """The encoded picture and its class. document: uint8 (n,), n >= 8."""
    data = memoryview(np.ascontiguousarray(document)).cast("B")
    return data[:-LABEL_BYTES], int.from_bytes(data[-LABEL_BYTES:], "little", signed=True)


def suffix_of(picture: bytes | memoryview) -> str:
    """Suffix of a file with these bytes, without a dot; "img" where it is none of the usual kinds."""
    head = bytes(picture[:12])
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "webp"
    return next((suffix for magic, suffix in _KINDS if head.startswith(magic)), "img")
