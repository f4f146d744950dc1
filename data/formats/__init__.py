"""Prepared shards behind one interface: MDS and WebDataset, local or remote, plain or zstd.

shards = open_dataset("prepared/shakespeare", "train")
shards.lengths(0)   # tokens of each document of the first shard
shards.read(0, 7)   # tokens of its eighth document
"""

import hashlib

from matmix.data.formats.base import TokenShards
from matmix.data.storage.storage import Storage


def open_dataset(
    path: str,
    split: str = "train",
    *,
    cache_dir: str = "",
    verify: bool = True,
    keep_open: int = 64,
    tokenizer_sha256: str | None = None,
    skip_damaged: bool = False,
    cache_bytes: int = 0,
) -> TokenShards:
    """Opens one split of a prepared dataset.

    path: folder or URL. cache_dir: where downloaded and decompressed shards go. verify: check SHA-256 of
    the shards. keep_open: shards held open at once. tokenizer_sha256: refuse shards made with another
    tokenizer than this. skip_damaged, cache_bytes: see `TokenShards`. Raises FileNotFoundError if path,
    split files or a shard are missing, ValueError if something is damaged or does not fit.
    """
    storage = Storage(path, cache_dir)
    manifest = storage.manifest
    tokenizer = storage.file(manifest.tokenizer.file)
    if hashlib.sha256(tokenizer.read_bytes()).hexdigest() != manifest.tokenizer.sha256:
        raise ValueError(
            f"{path}: {manifest.tokenizer.file} is not the tokenizer that the shards were made with; "
            "put the original back or prepare the data again"
        )
    if tokenizer_sha256 is not None and tokenizer_sha256 != manifest.tokenizer.sha256:
        raise ValueError(
            f"{path} was prepared with another tokenizer (SHA-256 {manifest.tokenizer.sha256[:12]}) than "
            f"this run uses ({tokenizer_sha256[:12]}); prepare the data again with this run's tokenizer"
        )
    return TokenShards(
        storage, split, verify=verify, keep_open=keep_open, skip_damaged=skip_damaged, cache_bytes=cache_bytes
    )


__all__ = ["Storage", "TokenShards", "open_dataset"]
