"""Where the files of a prepared dataset are: in a local folder, or at a remote URL with a local cache.

Files of a local folder are used where they lie. Remote files are downloaded (`download.py`: s3://, gs://,
oci://, azure://, hf://, sftp://, dbfs:/, ...; file:// copies from a mounted folder) into the cache, and zstd
shards, local or remote, are decompressed into it once. A file appears
in the cache under its final name only when it is complete and its checksum right (written under another
name, then renamed), and a lock file lets one of the processes of a machine do the work while the others
wait. The cache folder of a dataset carries the digest of its manifest, so that data prepared anew under
the same path can never meet an old cache.
"""

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from matmix.data.manifest import Manifest, ShardInfo
from matmix.data.private import check_named, is_own, private_folder
from matmix.data.remote import RemoteError, is_url
from matmix.data.streams.damage import DamagedShard
from matmix.data.streams.download import download
from matmix.data.streams.manifest import parse_manifest

_HASH_CHUNK = 1 << 22


class Storage:
    """Gives local paths for the files of one prepared dataset.

    path: local folder or URL. cache_dir: folder for downloads and decompressed shards, which a group may share; "" =
    `.cache` inside a local folder that can be written to, unless it is another user's, else matmix/data in the user's
    cache folder; nobody else can write there.
    Raises FileNotFoundError if nothing is there, ValueError if it is not a prepared dataset, or if everybody may write
    to `cache_dir`.
    """

    def __init__(self, path: str, cache_dir: str = "") -> None:
        self.path = path
        self.remote = is_url(path) or path.startswith("dbfs:/")
        if not self.remote and not Path(path).exists():
            raise FileNotFoundError(f"data path {path} does not exist; make it with `matmix prepare`")
        if not self.remote and not (Path(path) / "manifest.json").is_file():
            raise ValueError(
                f"{path} is not a prepared dataset: it has no manifest.json; make one with `matmix prepare`"
            )
        raw = self._read_remote_manifest() if self.remote else (Path(path) / "manifest.json").read_bytes()
        self.manifest: Manifest = parse_manifest(raw, path)
        self.digest = hashlib.sha256(raw).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.rstrip("/").rsplit("/", 1)[-1]) or "data"
        self._cache_is_named = bool(cache_dir)
        self.cache = _cache_root(path, self.remote, cache_dir) / f"{stem}-{self.digest[:16]}"
        if self.remote and not (self.cache / "manifest.json").exists():
            with self._lock("manifest.json"):
                self._publish("manifest.json", lambda part: part.write_bytes(raw))

    @property
    def root(self) -> Path:
        """Local folder that holds (or will hold) manifest, tokenizer and index files."""
        return self.cache if self.remote else Path(self.path)

    def file(self, name: str) -> Path:
        """Local path of a file that is not a shard (`name` relative to the dataset), downloaded if need
        be."""
        target = self.root / name
        if target.exists():
            return target
        if not self.remote:
            raise FileNotFoundError(f"{self.path}: {name} is missing; prepare the data again")
        with self._lock(name):
            if not target.exists():
                self._publish(name, lambda part: self._download(name, part))
        return target

    def is_there(self) -> bool:
        """Whether a local dataset can be reached at all (remote ones: downloads tell)."""
        return self.remote or (Path(self.path) / "manifest.json").is_file()

    def check_shard(self, split: str, shard: ShardInfo) -> None:
        """Cheap check, without reading it, that a local shard is there and whole (remote ones: when
        fetched)."""
        if self.remote:
            return
        stored = Path(self.path) / split / shard.file
        if not stored.is_file():
            raise FileNotFoundError(f"{self.path}: shard {split}/{shard.file} is missing; prepare the data again")
        size = stored.stat().st_size
        if size != shard.bytes:
            raise DamagedShard(
                f"{self.path}: shard {split}/{shard.file}",
                f"has {size} bytes instead of {shard.bytes}, it is truncated or was changed; prepare the data again",
            )

    def shard(self, split: str, shard: ShardInfo, *, verify: bool = True) -> Path:
        """Local path of the uncompressed shard, downloaded and decompressed if need be.

        Raises FileNotFoundError if it is missing, DamagedShard if its checksum is wrong or it does not
        decompress.
        """
        stored = f"{split}/{shard.file}"
        compressed = self.manifest.compression is not None
        if not self.remote and not compressed:
            self.check_shard(split, shard)
            path = Path(self.path) / stored
            if verify:
                self._check_hash(path, shard, stored)
            return path
        name = f"{split}/{Path(shard.file).stem}" if compressed else stored
        target = self.cache / name
        if target.exists():
            return target
        with self._lock(name):
            if not target.exists():
                self._publish(name, lambda part: self._fill(part, split, shard, compressed))
        return target

    def _fill(self, part: Path, split: str, shard: ShardInfo, compressed: bool) -> None:
        stored = f"{split}/{shard.file}"
        if not compressed:
            self._download_shard(stored, part, shard)
            return
        if not self.remote:
            self.check_shard(split, shard)
            source = Path(self.path) / stored
            self._check_hash(source, shard, stored)
            self._decompress(source, part, stored)
            return
        source = part.with_name(part.name + ".source")
        try:
            self._download_shard(stored, source, shard)
            self._decompress(source, part, stored)
        finally:
            source.unlink(missing_ok=True)

    def _download_shard(self, stored: str, target: Path, shard: ShardInfo) -> None:
        self._download(stored, target)
        try:
            self._check_hash(target, shard, stored)
        except ValueError:
            # Damaged on the way, or where it lies? A second copy tells.
            self._download(stored, target)
            self._check_hash(target, shard, stored)

    def _decompress(self, source: Path, target: Path, stored: str) -> None:
        import zstandard

        try:
            with source.open("rb") as compressed, target.open("wb") as raw:
                zstandard.ZstdDecompressor().copy_stream(compressed, raw)
        except zstandard.ZstdError as error:
            raise DamagedShard(f"{self.path}: shard {stored}", f"does not decompress ({error})") from None

    def _check_hash(self, path: Path, shard: ShardInfo, stored: str) -> None:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != shard.sha256:
            raise DamagedShard(
                f"{self.path}: shard {stored}",
                "has another SHA-256 than the manifest says, it is damaged or was changed; fetch or prepare the data "
                "again",
            )

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        target = self.cache / name
        lock = FileLock(f"{target}.lock")
        try:
            if not self._cache_is_named:
                private_folder(self.cache.parent, close=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write the data cache {self.cache} ({error}); set data.cache_dir") from None
        try:
            yield
        finally:
            lock.release()

    def _publish(self, name: str, fill: Callable[[Path], object]) -> None:
        """Makes cache file `name` by `fill` under another name, then renames it into place."""
        target = self.cache / name
        part = target.with_name(f"{target.name}.part-{os.getpid()}")
        try:
            fill(part)
            os.replace(part, target)
        except OSError as error:
            if isinstance(error, FileNotFoundError | RemoteError):
                raise
            raise ValueError(f"cannot write {target} to the data cache ({error}); see data.cache_dir") from None
        finally:
            part.unlink(missing_ok=True)

    def _download(self, name: str, target: Path) -> None:
        download(f"{self.path.rstrip('/')}/{name}", target)

    def _read_remote_manifest(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "manifest.json"
            try:
                self._download("manifest.json", target)
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
