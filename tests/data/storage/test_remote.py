"""Files below URLs, against a real S3-compatible server, a mounted folder and fsspec's memory."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from object_store import ObjectStore, running_store

from matmix.data.storage import remote
from matmix.data.storage.remote import RemoteError, RemoteFolder


@pytest.fixture
def store(monkeypatch):
    with running_store(monkeypatch) as running:
        yield running


@pytest.fixture(params=["s3", "file", "memory"])
def folder(request, tmp_path) -> RemoteFolder:
    if request.param == "s3":
        return RemoteFolder(request.getfixturevalue("store").url + "/some/where")
    if request.param == "file":
        return RemoteFolder((tmp_path / "mounted" / "where").as_uri())
    return RemoteFolder(f"memory://{uuid.uuid4().hex}/where")


def test_files_come_back_as_they_were(folder, tmp_path):
    assert folder.sizes() == {}
    assert folder.read("config.toml") is None
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    contents = {"a": b"", "sub/b": b"bytes" * 1000, "sub/c d%20.bin": bytes(range(256))}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    folder.upload_all(source, contents)
    folder.write("small", b"one")
    folder.write("small", b"two")
    assert folder.read("small") == b"two"
    assert folder.sizes() == {**{name: len(content) for name, content in contents.items()}, "small": 3}
    assert folder.sizes("sub") == {"sub/b": 5000, "sub/c d%20.bin": 256}
    assert RemoteFolder(f"{folder.url}/sub").sizes() == {"b": 5000, "c d%20.bin": 256}
    folder.download_all(contents, tmp_path / "back")
    assert {name: (tmp_path / "back" / name).read_bytes() for name in contents} == contents
    folder.remove(["sub/b", "never/there", "small"])
    assert set(folder.sizes()) == {"a", "sub/c d%20.bin"}


def test_a_missing_file_is_named_at_once(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"^cannot download {folder.url}/none: it does not exist$"):
        folder.download("none", tmp_path / "target")
    assert not list(tmp_path.glob("*target*"))


def test_errors_that_pass_are_not_seen(store, tmp_path):
    folder = RemoteFolder(f"{store.url}/x")
    store.fail(3)
    folder.write("a", b"here")
    store.fail(3, method="GET")
    folder.download("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"here"


def test_the_last_error_is_one_line_with_the_url(store, tmp_path):
    folder = RemoteFolder(f"{store.url}/x")
    folder.write("a", b"old")
    store.fail(100)
    with pytest.raises(RemoteError, match=rf"^cannot write {store.url}/x/a: OSError: .*internal error") as caught:
        folder.write("a", b"new")
    assert "\n" not in str(caught.value)
    store.fail(100, method="GET")
    with pytest.raises(RemoteError, match=rf"^cannot download {store.url}/x/a: "):
        folder.download("a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    store.fail(0)
    assert folder.read("a") == b"old"


def test_a_store_that_is_away_for_a_moment(store, monkeypatch):
    monkeypatch.setenv(remote.RETRY_VARIABLE, "60")
    folder = RemoteFolder(f"{store.url}/x")
    folder.write("a", b"before")
    store.stop()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(folder.write, "a", b"after")
        with pytest.raises(TimeoutError):
            writing.result(timeout=1.0)
        store.start()
        writing.result(timeout=60)
    assert store.get("x/a") == b"after"


def test_a_store_that_is_away_for_good(store):
    folder = RemoteFolder(f"{store.url}/x")
    store.stop()
    with pytest.raises(RemoteError, match=rf"^cannot read {store.url}/x/a: \w+: .*connect"):
        folder.read("a")


def test_missing_credentials_and_buckets_are_not_tried_again(store, monkeypatch):
    requests = len(store.requests)
    with pytest.raises(
        FileNotFoundError, match=r"^cannot write s3://no-such-bucket/x/a: there is no such bucket or folder$"
    ):
        RemoteFolder("s3://no-such-bucket/x").write("a", b"")
    assert len(store.requests) == requests + 1
    import s3fs

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(RemoteError, match=r"^cannot write s3://\S+/a without credentials \(FSSPEC_S3_ANON=true "):
        RemoteFolder(f"{store.url}/x").write("a", b"")


def test_urls_that_cannot_be_used():
    with pytest.raises(ValueError, match=r"^cannot use gs://bucket/x: its client is not installed \(pip install gcsfs"):
        RemoteFolder("gs://bucket/x")
    with pytest.raises(ValueError, match=r"^cannot use nowhere://x: "):
        RemoteFolder("nowhere://x")
    with pytest.raises(ValueError, match="password") as caught:
        RemoteFolder("sftp://me:hunter2@host/x")
    assert "hunter2" not in str(caught.value)
    assert remote.is_url("s3://bucket")
    assert not remote.is_url("runs/a")


@pytest.mark.parametrize("patient", [True, False])
def test_a_mistake_in_the_program_is_neither_tried_again_nor_taken_for_the_stores(monkeypatch, patient):
    monkeypatch.setenv(remote.RETRY_VARIABLE, "60")
    folder, calls = RemoteFolder("memory://mistakes/where", patient=patient), []

    def action(client, path):
        calls.append(path)
        return client.size(path, of_what="a name that it does not take")

    with pytest.raises(TypeError, match="of_what"):
        folder._do("look at", "a", action)
    assert len(calls) == 1


def test_a_file_is_created_once(folder):
    folder.create("leases/one", b"first")
    with pytest.raises(FileExistsError):
        folder.create("leases/one", b"second")
    assert folder.read("leases/one") == b"first"


def test_a_store_that_does_not_name_the_condition_creates_a_file_once(store):
    store.names_conditions = False
    test_a_file_is_created_once(RemoteFolder(f"{store.url}/x"))


def test_a_short_download_is_fetched_again(folder, tmp_path, monkeypatch):
    folder.write("a", b"0123456789")
    client, _ = folder._connect()
    real, cut = client.get_file, [4, 7]

    def get_file(path, target, **options):
        real(path, target, **options)
        if cut:
            with open(target, "r+b") as file:
                file.truncate(cut.pop())

    monkeypatch.setattr(client, "get_file", get_file)
    folder.download("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert not cut


def test_the_store_keeps_what_it_has_over_a_restart(store: ObjectStore):
    store.put("key", b"value")
    store.stop()
    store.start()
    assert store.names() == ["key"]


def test_keys_that_climb_are_not_listed(store):
    for name in ("../../escaped", "fine..", "a/../../../b"):
        store.put(f"some/where/{name}", b"1")
    assert store.names("some/where/") == ["some/where/../../escaped", "some/where/a/../../../b", "some/where/fine.."]
    assert RemoteFolder(f"{store.url}/some/where").sizes() == {"fine..": 1}
