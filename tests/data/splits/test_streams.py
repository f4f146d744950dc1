"""Shards of both formats: reading, caches, remote copies, and what is said about damaged ones."""

import hashlib
import io
import json
import multiprocessing
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from failures import each
from hostile_data import edit_manifest
from manifests import set_value

from matmix.data.formats import webdataset
from matmix.data.splits.reader import open_dataset
from matmix.data.storage import storage
from matmix.data.storage.remote import RemoteError


def everything(shards) -> list[list[int]]:
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def test_documents_come_back(any_format, data, tmp_path):
    shards = open_dataset(str(any_format), cache_dir=str(tmp_path), keep_open=2)
    expected = [d.tolist() for d in data.documents(43)]
    assert everything(shards) == expected
    assert shards.read(5, 2).dtype == np.uint16
    assert shards.read(0, 2).tolist() == expected[2]  # a shard that was closed meanwhile
    assert everything(open_dataset(str(any_format), "validation", cache_dir=str(tmp_path))) == expected[:3]


@pytest.mark.parametrize("kind", ["mds", "webdataset"])
def test_large_vocabularies(data, tmp_path, kind):
    documents = [np.array([70_000, 5, 2**32 - 1]), np.arange(300) + 2**20]
    path = data.write(tmp_path / "data", documents, format=kind, dtype="uint32")
    assert everything(open_dataset(str(path))) == [d.tolist() for d in documents]


def test_pickling_carries_no_data(small):
    shards = open_dataset(str(small))
    expected = everything(shards)
    raw = pickle.dumps(shards)
    assert len(raw) < 5000
    assert everything(pickle.loads(raw)) == expected


def test_remote_copy(any_format, data, tmp_path):
    shards = open_dataset(any_format.as_uri(), cache_dir=str(tmp_path / "cache"))
    (cache,) = (tmp_path / "cache").iterdir()
    assert not list(cache.glob("train/*shard*"))  # shards come when they are needed
    expected = [d.tolist() for d in data.documents(43)]
    assert everything(shards) == expected
    names = {f.name for f in cache.rglob("*") if f.is_file() and f.suffix != ".lock"}
    assert not [n for n in names if ".part" in n or n.endswith((".zst", ".zstd"))]
    # Once in the cache, the shards are not fetched again.
    away = copy(any_format, tmp_path / "away")
    for file in [*away.glob("train/*.mds*"), *away.glob("train/*.tar*")]:
        file.unlink()
    cached = storage.Storage(away.as_uri(), str(tmp_path / "cache"))
    shutil.copytree(cache, cached.cache, dirs_exist_ok=True)
    assert everything(open_dataset(away.as_uri(), cache_dir=str(tmp_path / "cache"))) == expected


def read_and_send(path: str, cache: str, log: Path, start, queue) -> None:
    real = storage.download

    def logged(url, target, largest, **options):
        with log.open("a") as file:
            file.write(url.rsplit("/", 1)[-1] + "\n")
        real(url, target, largest, **options)

    storage.download = logged
    start.wait()
    queue.put(everything(open_dataset(path, cache_dir=cache)))


def test_processes_share_one_cache(data, tmp_path):
    path = data.write(tmp_path / "data", data.documents(43), compression="zstd")
    context = multiprocessing.get_context("fork")
    start, queue = context.Event(), context.Queue()
    args = (path.as_uri(), str(tmp_path / "cache"), tmp_path / "log", start, queue)
    processes = [context.Process(target=read_and_send, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    start.set()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert all(result == [d.tolist() for d in data.documents(43)] for result in results)
    fetched = sorted(line for line in (tmp_path / "log").read_text().split() if line != "manifest.json")
    assert fetched == sorted(set(fetched))
    assert sum(name.endswith(".zstd") for name in fetched) == 6


def test_where_the_cache_is(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    path = data.write(tmp_path / "data", data.documents(3), compression="zstd")
    everything(open_dataset(str(path)))
    assert [f.name for f in path.rglob(".cache/data-*/train/*.mds")] == ["shard.00000.mds"]
    assert not (tmp_path / "user").exists()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    everything(open_dataset(str(path)))
    everything(open_dataset(path.as_uri()))
    found = [f.name for f in tmp_path.rglob("user/matmix/data/data-*/train/*.mds")]
    assert found == ["shard.00000.mds"]


def test_new_data_at_the_same_url_does_not_meet_the_old_cache(data, tmp_path):
    path, cache = tmp_path / "data", str(tmp_path / "cache")
    data.write(path, data.documents(5))
    old = everything(open_dataset(path.as_uri(), cache_dir=cache))
    shutil.rmtree(path)
    data.write(path, data.documents(5, seed=1))
    assert everything(open_dataset(path.as_uri(), cache_dir=cache)) != old


class FlakyDownloader:
    """Stands in for a cloud client: fails `failures` times, then copies."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def download(self, remote: str, local: str) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("reset by peer\nand a page of detail")
        Path(local).write_text("here")

    def clean_up(self) -> None:
        pass


@pytest.fixture
def flaky(monkeypatch):
    from streaming.base.storage import CloudDownloader

    def use(failures: int) -> None:
        monkeypatch.setattr(CloudDownloader, "get", classmethod(lambda cls, url: FlakyDownloader(failures)))

    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    monkeypatch.setenv("MATMIX_RETRY_SECONDS", "0")
    return use


@pytest.mark.parametrize("scheme", ["oci", "sftp", "gs"])
def test_downloads_by_streaming_are_tried_again(flaky, tmp_path, scheme):
    flaky(2)
    storage.download(f"{scheme}://bucket/file", tmp_path / "file", 1 << 20)
    assert (tmp_path / "file").read_text() == "here"
    flaky(10**9)
    with pytest.raises(RemoteError, match=rf"^cannot download {scheme}://bucket/file: ConnectionError: reset by peer$"):
        storage.download(f"{scheme}://bucket/file", tmp_path / "file", 1 << 20)


def test_unknown_scheme():
    with pytest.raises(ValueError, match=r"^cannot use nowhere://host/data: .*Protocol not known"):
        open_dataset("nowhere://host/data")


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing does not exist"):
        open_dataset(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="no prepared dataset at file://"):
        open_dataset((tmp_path / "missing").as_uri())
    with pytest.raises(ValueError, match=r"is not a prepared dataset: it has no manifest.json"):
        open_dataset(str(tmp_path))


@each(
    "change, message",
    [
        (set_value("version", 2), "has version 2, this matmix reads version 1"),
        (set_value("format", "parquet"), "says format 'parquet'; readable are mds, webdataset"),
        (set_value("compression", "gzip"), "says compression 'gzip'"),
        (set_value("dtype", "int64"), "says dtype 'int64'"),
        (set_value("tokenizer", "file", "../secret"), r"damaged .it names the file '../secret', which climbs"),
        (
            set_value("splits", "train", "shards", 0, "file", "../shard"),
            "names the file '../shard', which has a separator",
        ),
        (set_value("splits", "train", "documents", 1), "do not add up to its documents"),
        (set_value("splits", "train", "shards", 0, "extra", 1), "manifest.json is damaged"),
        (lambda manifest: manifest.pop("splits"), "manifest.json is damaged"),
        (
            lambda manifest: manifest.pop("version"),
            "not a prepared dataset: its manifest.json has no version",
        ),
        (
            set_value("splits", "train", "shards", 0, "sha256", "0" * 64),
            "shard.00000.mds has another SHA-256",
        ),
        (set_value("tokenizer", "sha256", "0" * 64), "has another SHA-256 than the manifest says"),
    ],
)
def test_manifest_errors(small, tmp_path, change, message):
    path = copy(small, tmp_path / "data")
    edit_manifest(path, change)
    with pytest.raises(ValueError, match=message) as error:
        everything(open_dataset(str(path)))
    assert "\n" not in str(error.value)


def test_unknown_split(small):
    with pytest.raises(ValueError, match="has no split 'test'; it has: train, validation"):
        open_dataset(str(small), "test")


def test_tokenizer_of_the_run_differs(small):
    open_dataset(str(small), tokenizer_sha256=json.loads((small / "manifest.json").read_text())["tokenizer"]["sha256"])
    with pytest.raises(ValueError, match=r"prepared with another tokenizer .* than this run uses .ffff"):
        open_dataset(str(small), tokenizer_sha256="f" * 64)


def stored_shard(path: Path, number: int) -> Path:
    return (
        path / "train" / json.loads((path / "manifest.json").read_text())["splits"]["train"]["shards"][number]["file"]
    )


def forge(path: Path, number: int, content: bytes, raw: bytes) -> None:
    """Puts other bytes into a shard, with manifest entries that agree with them."""
    stored_shard(path, number).write_bytes(content)
    digests = {"sha256": hashlib.sha256(content).hexdigest(), "raw_sha256": hashlib.sha256(raw).hexdigest()}
    entry = {"bytes": len(content), "raw_bytes": len(raw), **digests}
    edit_manifest(path, lambda manifest: manifest["splits"]["train"]["shards"][number].update(entry))


def test_shards_that_are_not_what_the_index_promises(any_format, tmp_path):
    """Checksums do not protect against a bad writer: the readers check what they use."""
    compressed = "zst" in stored_shard(any_format, 0).name
    other = stored_shard(any_format, 1).read_bytes()
    if compressed:
        other = zstandard.ZstdDecompressor().stream_reader(other).read()
    for name, raw in {"one": b"", "two": b"\xff" * 3000, "three": other}.items():
        path = copy(any_format, tmp_path / name)
        forge(path, 2, zstandard.ZstdCompressor().compress(raw) if compressed else raw, raw)
        with pytest.raises(ValueError, match=r"shard train/\S+ is damaged|do not"):
            everything(open_dataset(str(path), cache_dir=str(tmp_path / "cache")))
    if compressed:
        path = copy(any_format, tmp_path / "garbage")
        forge(path, 2, b"not zstd at all", b"")
        with pytest.raises(ValueError, match="does not decompress"):
            everything(open_dataset(str(path), cache_dir=str(tmp_path / "cache")))


def test_pickled_columns_are_refused(small, tmp_path):
    path = copy(small, tmp_path / "data")
    index = path / "train" / "index.json"
    index.write_text(index.read_text().replace('"ndarray:uint16"', '"pkl"'))
    with pytest.raises(ValueError, match="unsafe type: pkl"):
        everything(open_dataset(str(path)))


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"shards": []}'])
def test_damaged_mds_index(small, tmp_path, content):
    path = copy(small, tmp_path / "data")
    (path / "train" / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"shard.00000.mds is damaged: index.json does not describe it"):
        everything(open_dataset(str(path)))


@each("content", ["", "text", "wrong dtype", "wrong number"])
def test_damaged_lengths(small, tmp_path, content):
    path = copy(small, tmp_path / "data")
    lengths = np.load(path / "train" / "lengths.npy")
    if content.startswith("wrong"):
        np.save(path / "train" / "lengths.npy", lengths.astype(int) if content == "wrong dtype" else lengths[:-1])
    else:
        (path / "train" / "lengths.npy").write_text(content)
    with pytest.raises(ValueError, match=r"train/lengths.npy (is|does)"):
        open_dataset(str(path))


def test_cache_that_cannot_be_written(data, tmp_path):
    path = data.write(tmp_path / "data", data.documents(3), compression="zstd")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write the data cache .*; set data.cache_dir"):
        everything(open_dataset(str(path), cache_dir=str(tmp_path / "file")))


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tar_members_of_other_kinds_are_passed_over(tmp_path, form):
    arrays = [np.arange(n, dtype=np.uint16) for n in (0, 3, 400)]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        folder = tarfile.TarInfo("folder.npy")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for i, array in enumerate(arrays):
            for ending, content in (("json", b"{}"), ("npy", npy(array))):
                long = "x" * 120 + "/" if form != tarfile.USTAR_FORMAT and i == 1 else ""
                member = tarfile.TarInfo(f"{long}{i}.{ending}")
                member.size = len(content)
                if form == tarfile.PAX_FORMAT:
                    member.pax_headers = {"comment": "é" * 300}
                tar.addfile(member, io.BytesIO(content))
    raw = (tmp_path / "a.tar").read_bytes()
    spans = webdataset._members(memoryview(raw), "here", webdataset._MAGIC)
    assert [raw[a:b] for a, b in spans] == [npy(a) for a in arrays]


def test_arrays_of_objects_are_refused(data, tmp_path):
    path = data.write(tmp_path / "data", data.documents(1), format="webdataset")
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    with tarfile.open(stored_shard(path, 0), "w") as tar:
        member = tarfile.TarInfo("0.npy")
        member.size = len(buffer.getvalue())
        tar.addfile(member, io.BytesIO(buffer.getvalue()))
    forge(path, 0, *[stored_shard(path, 0).read_bytes()] * 2)
    with pytest.raises(ValueError, match="document 0 is not an npy array of 1 uint16 tokens"):
        open_dataset(str(path)).read(0, 0)
