"""Gives local paths for the files of a prepared dataset, which lies in a local folder or at a URL.

Remote files are downloaded into a cache, and zstd shards, local or remote, are decompressed into it once. A file gets
its name there only when it is complete, verified and on the disk, and each process compares it with its checksum before
first use. The cache folder's name has the digest of the manifest, so newly prepared data never meets an old cache.

fsspec reads every scheme whose client is installed. mosaicml-streaming's downloaders read oci://, azure://, dbfs:/,
alipan:// and gs:// without gcsfs, and sftp://, because they check the host's key, which fsspec does not; with
`data.reader = "streaming"` they fetch the shards of all schemes but file://.
"""

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from matmix.data.artifacts import artifact_path
from matmix.data.formats import READ_ONLY
from matmix.data.formats.base import DamagedShard, ShardInfo
from matmix.data.manifest import MANIFEST_NAME, Manifest
from matmix.data.storage import remote
from matmix.data.storage.files import sha256_of, sync_directory, sync_file
from matmix.data.storage.private import check_named, is_own, private_folder

logger = logging.getLogger(__name__)

_BY_STREAMING = ("sftp", "dbfs", "oci", "azure", "azure-dl", "alipan")
# Bytes that a decompressor hands over at once, however much of it the input asks for.
_PIECE = 1 << 20
_NPY_HEADER = 4096
# Bound for files beside the shards whose size does not follow from the manifest.
_LARGEST_FILE = 1 << 30
_OTHER_INDEXED = "has another SHA-256 than its index says"
_INDEX_AGAIN = "put the file back, or delete manifest.json and run `matmix index` again"
_FETCH_AGAIN = "it is damaged or was changed; fetch or prepare the data again"
_OTHER_HASH = f"has another SHA-256 than the manifest says, {_FETCH_AGAIN}"


class Storage:
    """One prepared dataset. path: local folder or URL. cache_dir: folder for downloads and decompressed shards, which a
    group may share; "" = `.cache` in a local dataset that this user may write to, unless another user owns it, else
    matmix/data in the user's cache folder.

    Raises FileNotFoundError if nothing is there, ValueError if it is no prepared dataset or everybody may write to
    `cache_dir`.
    """

    def __init__(self, path: str, cache_dir: str = "") -> None:
        remote.refuse_secrets(path, "the path of a dataset")
        self.path = path
        self.remote = remote.is_url(path) or path.startswith("dbfs:/")
        if not self.remote and not Path(path).exists():
            raise FileNotFoundError(f"data path {path} does not exist; make it with `matmix prepare`")
        if not self.remote and not (Path(path) / MANIFEST_NAME).is_file():
            raise ValueError(
                f"{path} is not a prepared dataset: it has no manifest.json; make one with `matmix prepare`"
            )
        raw = self._read_remote_manifest() if self.remote else (Path(path) / MANIFEST_NAME).read_bytes()
        self.manifest: Manifest = Manifest.parse(raw, path)
        if self.remote and self.manifest.format in READ_ONLY:
            raise ValueError(f"{path} holds an index of tokens that are read where they lie: copy its folder here")
        self.by_streaming = False
        """Fetch shards by mosaicml-streaming's clients from wherever it has one."""
        self.published = 0
        """Number of files that this process has put into the cache."""
        self._checked: set[str] = set()
        self._digests = dict(self.manifest.files)
        if self.manifest.tokenizer is not None:
            self._digests[self.manifest.tokenizer.file] = self.manifest.tokenizer.sha256
        self.digest = hashlib.sha256(raw).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.rstrip("/").rsplit("/", 1)[-1]) or "data"
        self._cache_is_named = bool(cache_dir)
        self.cache = cache_root(path, self.remote, cache_dir) / f"{stem}-{self.digest[:16]}"
        if self.remote:
            self._cached(MANIFEST_NAME, lambda path: True, lambda part: part.write_bytes(raw))

    @property
    def root(self) -> Path:
        """Local folder of the manifest, the tokenizer and the index files (which may still have to be downloaded)."""
        return self.cache if self.remote else Path(self.path)

    def file(self, name: str) -> Path:
        """Returns the local path of a file that is no shard, downloaded if need be. name: relative to the dataset.
        Raises FileNotFoundError if it is missing, ValueError if the manifest's digest is another."""
        target = artifact_path(self.root, name, self.path, nested=True)

        def is_good(path: Path) -> bool:  # hashes it once in a process
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
        """Returns how many bytes a file beside the shards may have."""
        folder, _, base = name.rpartition("/")
        split = self.manifest.splits.get(folder)
        if name == self.manifest.token_histogram and self.manifest.tokenizer is not None:
            return _NPY_HEADER + 8 * self.manifest.tokenizer.vocab_size
        if split is not None and base == "lengths.npy":
            return _NPY_HEADER + 4 * split.documents
        return _LARGEST_FILE

    def is_there(self) -> bool:
        """Returns False where a local dataset has gone; for remote ones, downloads tell."""
        folder = self.manifest.folder
        return self.remote or (
            (Path(self.path) / MANIFEST_NAME).is_file() and (folder is None or Path(folder).is_dir())
        )

    def check_shard(self, split: str, shard: ShardInfo) -> None:
        """Checks, without reading it, that a local shard is there and has its size; remote ones when fetched."""
        if not self.remote:
            self._local_shard(split, shard, verify=False)

    def _local_shard(self, split: str, shard: ShardInfo, verify: bool = True) -> Path:
        """Returns the path of a shard as a local dataset stores it; verify: compares its bytes with its digest."""
        (name, offset, file_bytes), where = shard.place(split), f"{self.path}: {shard.called(split)}"
        in_place = self.manifest.format in READ_ONLY
        again = _INDEX_AGAIN if in_place else "prepare the data again"
        path = artifact_path(self.manifest.folder or self.path, name, self.path, nested=True)
        if not path.is_file():
            place = f" in {self.manifest.folder}" if self.manifest.folder else ""
            raise FileNotFoundError(f"{where} is missing{place}; {again}")
        if (size := path.stat().st_size) != file_bytes:
            what = f"has {size} bytes instead of {file_bytes}, it is truncated or was changed"
            raise DamagedShard(where, f"{what}; {again}")
        if verify and sha256_of(path, offset, shard.bytes) != shard.sha256:
            raise DamagedShard(where, f"{_OTHER_INDEXED}; {again}" if in_place else _OTHER_HASH)
        return path

    def shard(self, split: str, shard: ShardInfo, *, verify: bool = True) -> Path:
        """Returns the local path of the uncompressed shard, downloaded and decompressed if need be. verify: compare its
        bytes with the manifest, and make a damaged copy in the cache again. Raises FileNotFoundError if it is missing,
        DamagedShard if its checksum is wrong or it does not decompress."""
        compressed = self.manifest.compression is not None
        if not self.remote and not compressed:
            return self._local_shard(split, shard, verify)
        digest = shard.raw_sha256 if compressed else shard.sha256

        def is_good(copy: Path) -> bool:
            try:
                return not verify or sha256_of(copy) == digest
            except FileNotFoundError:  # another process made room
                return False

        def fill(part: Path) -> None:
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

        return self._cached(f"{split}/{Path(shard.file).stem if compressed else shard.file}", is_good, fill)

    def _cached(self, name: str, is_good: Callable[[Path], bool], fill: Callable[[Path], object]) -> Path:
        """Returns a file's path in the cache. `fill` makes a missing or damaged one, while other processes wait."""
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
            was_there = target.exists()  # and damaged; otherwise another process may have made room meanwhile
            part = target.with_name(f"{target.name}.part-{os.getpid()}")
            try:
                fill(part)
                sync_file(part)
                os.replace(part, target)
                sync_directory(target.parent)
            except (FileNotFoundError, remote.RemoteError):
                raise
            except OSError as error:
                raise ValueError(f"cannot write {target} to the data cache ({error}); see data.cache_dir") from None
            finally:
                part.unlink(missing_ok=True)
        self.published += 1
        if was_there:
            logger.warning(f"{target} was damaged in the data cache, or could not be checked: it was made again")
        return target

    def _download_shard(self, stored: str, target: Path, shard: ShardInfo) -> None:
        where = f"{self.path}: shard {stored}"
        try:
            if not self._download(stored, target, shard.bytes, lambda path: sha256_of(path) == shard.sha256):
                raise DamagedShard(where, _OTHER_HASH)
        except remote.FileTooLarge as error:
            raise DamagedShard(where, f"is damaged: {error}") from None

    def _decompress(self, source: Path, part: Path, shard: ShardInfo, stored: str) -> None:
        where = f"{self.path}: shard {stored}"
        try:
            written = decompress(source, part, min(shard.raw_bytes, shard.largest_raw_size(self.manifest.dtype)))
        except ValueError as error:
            raise DamagedShard(where, str(error)) from None
        if written != (shard.raw_bytes, shard.raw_sha256):
            raise DamagedShard(where, f"decompresses to other bytes than its manifest says; {_FETCH_AGAIN}")

    def _download(self, name: str, target: Path, largest: int, is_good: Callable[[Path], bool]) -> bool:
        """Downloads a file, a second time where the first copy is damaged; returns False if both are."""
        for _ in range(2):
            download(f"{self.path.rstrip('/')}/{name}", target, largest, by_streaming=self.by_streaming)
            if is_good(target):
                return True
        return False

    def _read_remote_manifest(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / MANIFEST_NAME
            try:
                download(f"{self.path.rstrip('/')}/{MANIFEST_NAME}", target, _LARGEST_FILE)
            except FileNotFoundError:
                raise FileNotFoundError(f"there is no prepared dataset at {self.path}: no manifest.json") from None
            return target.read_bytes()


def download(url: str, target: Path, largest: int, *, by_streaming: bool = False) -> None:
    """Downloads one file of at most `largest` bytes (where the client tells the size beforehand). by_streaming: by
    mosaicml-streaming, which has no client for file://. Raises FileNotFoundError, FileTooLarge, ValueError if nothing
    installed reads such URLs, RemoteError if the store fails."""
    folder, _, name = url.rpartition("/")
    problem = None
    scheme = url.partition(":")[0]
    if scheme == "file" or not (by_streaming or scheme in _BY_STREAMING):
        try:
            store = remote.RemoteFolder(folder)
        except ValueError as error:
            problem = error
        else:
            return store.download(name, target, largest)
    from streaming.base.storage import CloudDownloader  # 3 seconds: only where its clients are needed

    try:
        downloader = CloudDownloader.get(url)
    except (ValueError, ImportError) as error:
        raise problem or ValueError(f"cannot read {url}: {remote.first_line(error)}") from None
    try:
        remote.persist(lambda: downloader.download(url, str(target)), f"cannot download {url}")
    finally:
        downloader.clean_up()


def read_small(place: str, name: str) -> bytes | None:
    """Returns a small file of a folder or URL; None where there is none."""
    if not remote.is_url(place):
        path = Path(place, name)
        return path.read_bytes() if path.is_file() else None
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FileNotFoundError):
        download(f"{place.rstrip('/')}/{name}", target := Path(folder, name), _LARGEST_FILE)
        return target.read_bytes()
    return None


def decompress(source: Path, target: Path, largest: int) -> tuple[int, str]:
    """Decompresses the zstd file `source` to `target`; returns the size of the result and its SHA-256. Raises
    ValueError (a few words) where it is damaged, has a window above 128 MiB, or holds more than `largest` bytes."""
    import zstandard

    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb") as compressed, target.open("wb") as raw:
            for chunk in zstandard.ZstdDecompressor().read_to_iter(compressed, write_size=_PIECE):
                size += len(chunk)
                if size > largest:
                    raise ValueError(f"decompresses to more than {largest:,} bytes, which is all that it may hold")
                digest.update(chunk)
                raw.write(chunk)
    except zstandard.ZstdError as error:
        raise ValueError(f"does not decompress ({error})") from None
    return size, digest.hexdigest()


def cache_root(path: str, at_url: bool, cache_dir: str) -> Path:
    if cache_dir:
        check_named(cache_dir, "data.cache_dir")
        return Path(cache_dir).expanduser()
    # The first user of a dataset that several may write to owns the folder in it; the others have their own.
    if not at_url and os.access(path, os.W_OK) and is_own(Path(path) / ".cache"):
        return Path(path) / ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "matmix" / "data"
