"""Where the files of a prepared dataset are: in a local folder, or at a remote URL with a local cache.

Files of a local folder are used where they lie. Remote files are downloaded (`fetch.py`: s3://, gs://,
oci://, azure://, hf://, sftp://, dbfs:/, ...; file:// copies from a mounted folder) into the cache, and zstd
shards, local or remote, are decompressed into it once. A file appears
in the cache under its final name only when it is complete, its checksum right and on the disk (written under
another name, then renamed), is compared with its checksum when a process first opens it, and made again where
it differs. A lock file lets one of the processes of a machine do the work while the others
wait. The cache folder of a dataset carries the digest of its manifest, so that data prepared anew under
the same path can never meet an old cache.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from matmix.data.artifacts import artifact_path
from matmix.data.formats.base import DamagedShard, ShardInfo
from matmix.data.manifest import Manifest
from matmix.data.storage.cache import read_note, write_note
from matmix.data.storage.fetch import decompress, download
from matmix.data.storage.files import sha256_of, sync_directory, sync_file
from matmix.data.storage.private import check_named, is_own, private_folder
from matmix.data.storage.remote import FileTooLarge, RemoteError, is_url
from matmix.data.storage.urls import refuse_secrets

logger = logging.getLogger(__name__)

_HEADER = 4096
# Of what a dataset has beside its shards, where its size does not follow from the manifest.
_LARGEST_FILE = 1 << 30
_FETCH_AGAIN = "it is damaged or was changed; fetch or prepare the data again"
_OTHER_HASH = f"has another SHA-256 than the manifest says, {_FETCH_AGAIN}"


class Storage:
    """Gives local paths for the files of one prepared dataset.

    path: local folder or URL. cache_dir: folder for downloads and decompressed shards, which a group may share; "" =
    `.cache` inside a local folder that can be written to, unless it is another user's, else matmix/data in the user's
    cache folder; nobody else can write there.
    Raises FileNotFoundError if nothing is there, ValueError if it is not a prepared dataset, or if everybody may write
    to `cache_dir`.
    """

    def __init__(self, path: str, cache_dir: str = "") -> None:
        refuse_secrets(path, "the path of a dataset")
        self.path = path
        self.remote = is_url(path) or path.startswith("dbfs:/")
        if not self.remote and not Path(path).exists():
            raise FileNotFoundError(f"data path {path} does not exist; make it with `matmix prepare`")
        if not self.remote and not (Path(path) / "manifest.json").is_file():
            raise ValueError(
                f"{path} is not a prepared dataset: it has no manifest.json; make one with `matmix prepare`"
            )
        raw = self._read_remote_manifest() if self.remote else (Path(path) / "manifest.json").read_bytes()
        self.manifest: Manifest = Manifest.parse(raw, path)
        self.published = 0
        """Files that this process has put into the cache."""
        self._checked: set[str] = set()
        self._digests = dict(self.manifest.files)
        if self.remote and self.manifest.tokenizer is not None:  # of a local one `open_dataset` tells
            self._digests[self.manifest.tokenizer.file] = self.manifest.tokenizer.sha256
        self.digest = hashlib.sha256(raw).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.rstrip("/").rsplit("/", 1)[-1]) or "data"
        self._cache_is_named = bool(cache_dir)
        self.cache = _cache_root(path, self.remote, cache_dir) / f"{stem}-{self.digest[:16]}"
        if self.remote:
            self._cached("manifest.json", lambda path: True, lambda part: part.write_bytes(raw))

    @property
    def root(self) -> Path:
        """Local folder that holds (or will hold) manifest, tokenizer and index files."""
        return self.cache if self.remote else Path(self.path)

    def file(self, name: str) -> Path:
        """Local path of a file that is not a shard (`name` relative to the dataset), downloaded if need be.

        Raises FileNotFoundError if it is missing, ValueError if it is not the file that the manifest means.
        """
        target = artifact_path(self.root, name, self.path, nested=True)

        def is_good(path: Path) -> bool:  # hashed once in a process
            if name not in self._checked and self._digests.get(name) in (None, sha256_of(path)):
                self._checked.add(name)
            return name in self._checked

        def fetch(part: Path) -> None:
            self._checked.discard(name)
            if not self._download(name, part, self._largest(name), is_good):
                raise ValueError(f"{self.path}: {name} {_OTHER_HASH}")

        if self.remote:
            return self._cached(name, is_good, fetch)
        if not target.exists():
            raise FileNotFoundError(f"{self.path}: {name} is missing; prepare the data again")
        if not is_good(target):
            raise ValueError(f"{self.path}: {name} {_OTHER_HASH}")
        return target

    def _largest(self, name: str) -> int:
        """Bytes that a file beside the shards may have."""
        folder, _, base = name.rpartition("/")
        split = self.manifest.splits.get(folder)
        if name == self.manifest.token_histogram and self.manifest.tokenizer is not None:
            return _HEADER + 8 * self.manifest.tokenizer.vocab_size
        if split is not None and base == "lengths.npy":
            return _HEADER + 4 * split.documents
        return _LARGEST_FILE

    def is_there(self) -> bool:
        """Whether a local dataset can be reached at all (remote ones: downloads tell)."""
        return self.remote or (Path(self.path) / "manifest.json").is_file()

    def check_shard(self, split: str, shard: ShardInfo) -> None:
        """Cheap check, without reading it, that a local shard is there and whole (remote ones: when
        fetched)."""
        if not self.remote:
            self._local_shard(split, shard, verify=False)

    def _local_shard(self, split: str, shard: ShardInfo, verify: bool = True) -> Path:
        """Path of a shard of a local dataset, as it is stored there; verify: its bytes are read, too."""
        where = f"{self.path}: shard {split}/{shard.file}"
        path = artifact_path(self.path, f"{split}/{shard.file}", self.path, nested=True)
        if not path.is_file():
            raise FileNotFoundError(f"{where} is missing; prepare the data again")
        if (size := path.stat().st_size) != shard.bytes:
            what = f"has {size} bytes instead of {shard.bytes}, it is truncated or was changed"
            raise DamagedShard(where, f"{what}; prepare the data again")
        if verify and sha256_of(path) != shard.sha256:
            raise DamagedShard(where, _OTHER_HASH)
        return path

    def shard(self, split: str, shard: ShardInfo, *, verify: bool = True) -> Path:
        """Local path of the uncompressed shard, downloaded and decompressed if need be.

        With `verify` its bytes are read and compared with what the manifest says; a damaged copy in the cache is made
        again. Raises FileNotFoundError if it is missing, DamagedShard if its checksum is wrong or it does not
        decompress.
        """
        stored = f"{split}/{shard.file}"
        compressed = self.manifest.compression is not None
        if not self.remote and not compressed:
            return self._local_shard(split, shard, verify)
        return self._cached(
            f"{split}/{Path(shard.file).stem}" if compressed else stored,
            lambda path: not verify or self._is_good_copy(path, shard, compressed),
            lambda part: self._fill(part, split, shard, compressed),
        )

    def _cached(self, name: str, is_good: Callable[[Path], bool], fill: Callable[[Path], object]) -> Path:
        """Path of a file in the cache. Where it is not there or not good, `fill` makes it under another name, from
        which it is renamed into place, while other processes wait."""
        target = artifact_path(self.cache, name, self.path, nested=True)
        if target.exists() and is_good(target):
            return target
        try:
            if not self._cache_is_named:
                private_folder(self.cache.parent, close=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            held = FileLock(f"{target}.lock").acquire()
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write the data cache {self.cache} ({error}); set data.cache_dir") from None
        with held:
            if target.exists() and is_good(target):
                return target
            there = target.exists()  # and damaged; others may have made room while it was read
            part = target.with_name(f"{target.name}.part-{os.getpid()}")
            try:
                fill(part)
                sync_file(part)
                os.replace(part, target)
                sync_directory(target.parent)
            except (FileNotFoundError, RemoteError):
                raise
            except OSError as error:
                raise ValueError(f"cannot write {target} to the data cache ({error}); see data.cache_dir") from None
            finally:
                part.unlink(missing_ok=True)
        self.published += 1
        if there:
            logger.warning(f"{target} was damaged in the data cache, or could not be checked: it was made again")
        return target

    def _is_good_copy(self, copy: Path, shard: ShardInfo, compressed: bool) -> bool:
        """Whether a copy in the cache has the bytes of the shard; not where others remove it meanwhile."""
        expected = (shard.raw_sha256 if compressed else shard.sha256) or read_note(copy, shard)
        try:
            return expected is not None and sha256_of(copy) == expected
        except FileNotFoundError:
            return False

    def _fill(self, part: Path, split: str, shard: ShardInfo, compressed: bool) -> None:
        stored = f"{split}/{shard.file}"
        if not compressed:
            return self._download_shard(stored, part, shard)
        if not self.remote:
            return self._decompress(self._local_shard(split, shard), part, shard, stored)
        source = part.with_name(part.name + ".source")
        try:
            self._download_shard(stored, source, shard)
            self._decompress(source, part, shard, stored)
        finally:
            source.unlink(missing_ok=True)

    def _download_shard(self, stored: str, target: Path, shard: ShardInfo) -> None:
        where = f"{self.path}: shard {stored}"
        try:
            if not self._download(stored, target, shard.bytes, lambda path: sha256_of(path) == shard.sha256):
                raise DamagedShard(where, _OTHER_HASH)
        except FileTooLarge as error:
            raise DamagedShard(where, f"is damaged: {error}") from None

    def _decompress(self, source: Path, part: Path, shard: ShardInfo, stored: str) -> None:
        largest = shard.largest_raw_size(self.manifest.dtype)
        where = f"{self.path}: shard {stored}"
        try:
            size, digest = decompress(source, part, min(largest, shard.raw_bytes or largest))
        except ValueError as error:
            raise DamagedShard(where, str(error)) from None
        if (shard.raw_bytes or size, shard.raw_sha256 or digest) != (size, digest):
            raise DamagedShard(where, f"decompresses to other bytes than its manifest says; {_FETCH_AGAIN}")
        if shard.raw_sha256 is None:
            write_note(part.with_name(part.name.rpartition(".part-")[0]), shard, digest)

    def _download(self, name: str, target: Path, largest: int, is_good: Callable[[Path], bool]) -> bool:
        """Whether the file is good. Where it is not, a second copy tells if it was damaged on the way or is where it
        lies."""
        for _ in range(2):
            download(f"{self.path.rstrip('/')}/{name}", target, largest)
            if is_good(target):
                return True
        return False

    def _read_remote_manifest(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "manifest.json"
            try:
                download(f"{self.path.rstrip('/')}/manifest.json", target, _LARGEST_FILE)
            except FileNotFoundError:
                raise FileNotFoundError(f"there is no prepared dataset at {self.path}: no manifest.json") from None
            return target.read_bytes()


def _cache_root(path: str, remote: bool, cache_dir: str) -> Path:
    if cache_dir:
        check_named(cache_dir, "data.cache_dir")
        return Path(cache_dir).expanduser()
    # Of several users of one dataset the first has the folder in it; the others have their own.
    if not remote and os.access(path, os.W_OK) and is_own(Path(path) / ".cache"):
        return Path(path) / ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "matmix" / "data"
