"""Fetches one file of a dataset from a URL.

fsspec reads every scheme whose client is installed (s3://, file://, memory://, hdfs://, gs:// with gcsfs ...).
mosaicml-streaming's downloaders read the schemes that are left: oci://, azure://, dbfs:/, alipan:// and gs:// without
gcsfs, because their clients come with it anyway; and sftp://, because it checks the host's key, which fsspec
does not. Either way the file is tried for again as `matmix.data.storage.remote` says.
"""

from __future__ import annotations

import functools
from pathlib import Path

from matmix.data.storage.remote import RemoteFolder, first_line, persist

_BY_STREAMING = ("sftp", "dbfs", "oci", "azure", "azure-dl", "alipan")


def download(url: str, target: Path, largest: int | None = None) -> None:
    """Downloads one file; `target` may be there in part while this runs, and is whole when it returns.

    largest: bytes that it may have (mosaicml-streaming's downloaders cannot tell beforehand).
    Raises FileNotFoundError if the file is not there, FileTooLarge, ValueError if nothing installed reads such URLs,
    and RemoteError if it cannot be fetched.
    """
    scheme = url.partition(":")[0]
    folder, _, name = url.rpartition("/")
    if scheme in _BY_STREAMING:
        return _download_by_streaming(url, target)
    try:
        remote = RemoteFolder(folder)
    except ValueError:
        if not _streaming_reads(url):
            raise
        return _download_by_streaming(url, target)
    return remote.download(name, target, largest)


def _streaming_reads(url: str) -> bool:
    from streaming.base.storage import CloudDownloader

    try:
        CloudDownloader.get(url)
    except (ValueError, ImportError):
        return False
    return True


def _download_by_streaming(url: str, target: Path) -> None:
    from streaming.base.storage import CloudDownloader

    try:
        downloader = CloudDownloader.get(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"cannot read {url}: {first_line(error)}") from None
    try:
        persist(functools.partial(downloader.download, url, str(target)), f"cannot download {url}")
    finally:
        downloader.clean_up()
