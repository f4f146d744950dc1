"""How one file of a dataset comes to this machine: downloaded from a URL, or decompressed.

fsspec reads every scheme whose client is installed (s3://, file://, memory://, hdfs://, gs:// with gcsfs ...).
mosaicml-streaming's downloaders read the schemes that are left: oci://, azure://, dbfs:/, alipan:// and gs:// without
gcsfs, because their clients come with it anyway; and sftp://, because it checks the host's key, which fsspec
does not. Either way the file is tried for again as `matmix.data.storage.remote` says.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from matmix.data.storage.remote import RemoteFolder, first_line, persist
from matmix.data.streaming_library import streaming_module

# What is decompressed is handed over in pieces of this size, however much of it the input asks for.
_PIECE = 1 << 20
_BY_STREAMING = ("sftp", "dbfs", "oci", "azure", "azure-dl", "alipan")


def download(url: str, target: Path, largest: int | None = None) -> None:
    """Downloads one file; `target` may be there in part while this runs, and is whole when it returns.

    largest: bytes that it may have (mosaicml-streaming's downloaders cannot tell beforehand).
    Raises FileNotFoundError if the file is not there, FileTooLarge, ValueError if nothing installed reads such URLs,
    and RemoteError if it cannot be fetched.
    """
    folder, _, name = url.rpartition("/")
    problem = None
    if url.partition(":")[0] not in _BY_STREAMING:
        try:
            remote = RemoteFolder(folder)
        except ValueError as error:
            problem = error
        else:
            return remote.download(name, target, largest)
    downloaders = streaming_module("storage").CloudDownloader
    try:
        downloader = downloaders.get(url)
    except (ValueError, ImportError) as error:
        raise problem or ValueError(f"cannot read {url}: {first_line(error)}") from None
    try:
        persist(lambda: downloader.download(url, str(target)), f"cannot download {url}")
    finally:
        downloader.clean_up()


def decompress(source: Path, target: Path, largest: int) -> tuple[int, str]:
    """Writes what `source` holds to `target`; gives its size and SHA-256.

    Raises ValueError (a few words) where it is damaged or holds more than `largest` bytes; `target` is to be removed
    then. Frames with a window above zstd's own default limit (128 MiB) are refused.
    """
    import zstandard

    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb") as compressed, target.open("wb") as raw:
            decoder = zstandard.ZstdDecompressor()
            for chunk in decoder.read_to_iter(compressed, write_size=_PIECE):
                size += len(chunk)
                if size > largest:
                    raise ValueError(f"decompresses to more than {largest:,} bytes, which is all that it may hold")
                digest.update(chunk)
                raw.write(chunk)
    except zstandard.ZstdError as error:
        raise ValueError(f"does not decompress ({error})") from None
    return size, digest.hexdigest()
