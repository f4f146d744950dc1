"""Leases of runs in a real object store: who is let in, who is told to wait, and who finds out that it lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from object_store import running_store

from matmix.data.storage.remote import RemoteFolder
from matmix.train.run import lock as lease
from matmix.train.run.lock import Lease, LeaseLostError


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.1)
    monkeypatch.setattr(lease, "LAPSE_SECONDS", 1.5)
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.1)
    with running_store(monkeypatch) as running:
        yield running


@pytest.fixture
def folder(store) -> RemoteFolder:
    return RemoteFolder(f"{store.url}/run")


def newest(store) -> str:
    return max(store.names("run/leases/"))


def edit(store, **changes) -> None:
    """Another owner's lease, as it stands when nobody renews it."""
    found = json.loads(store.get(newest(store)))
    owner = {**found["owner"], **changes.pop("owner", {})}
    store.put(newest(store), json.dumps({**found, "held": True, "owner": owner, **changes}).encode())


def test_the_second_job_is_told_who_the_first_is(folder, told):
    first, second = Lease(folder), Lease(folder)
    first.acquire()
    with pytest.raises(ValueError, match=rf"^run_dir {folder.url} is in use by another job \(host ") as error:
        second.acquire()
    assert f"process {os.getpid()}" in str(error.value)
    assert "\n" not in str(error.value)
    first.check()
    first.release()
    second.acquire()
    assert (first.starts, second.starts) == (1, 2)
    second.release()


@pytest.mark.parametrize("conditional", [True, False])
def test_of_two_that_find_it_free_one_gets_it(folder, monkeypatch, conditional):
    if not conditional:  # a store that lets both create the same object
        monkeypatch.setattr(RemoteFolder, "create", RemoteFolder.write)
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 1.0)
    both = threading.Barrier(2)
    read = Lease._newest

    def read_together(self):
        found = read(self)
        if not self._content:
            both.wait()
        return found

    monkeypatch.setattr(Lease, "_newest", read_together)
    leases, errors = [Lease(folder), Lease(folder)], []

    def acquire(wanted):
        try:
            wanted.acquire()
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=acquire, args=(wanted,)) for wanted in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert "in use by another job" in errors[0]
    for wanted in leases:
        wanted.release()


def test_an_owner_on_another_host_that_is_gone_is_waited_for(folder, store, told):
    first = Lease(folder)
    first.acquire()
    first.release()
    edit(store, owner={"host": "node-7", "space": "elsewhere", "pid": 1})
    second = Lease(folder)
    second.acquire()
    assert len(told) == 1
    assert "host node-7, process 1" in told[0]
    second.release()


def test_owners_that_are_known_to_be_gone_are_not_waited_for(folder, store, monkeypatch, told):
    monkeypatch.setattr(lease, "LAPSE_SECONDS", 600.0)
    first = Lease(folder)
    first.acquire()
    first.release()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    edit(store, owner={"pid": dead.pid})
    second = Lease(folder)
    second.acquire()
    second.release()
    edit(store, owner={"host": "node-7", "space": "elsewhere", "job": "4711", "attempt": "4711.0"})
    monkeypatch.setenv("MATMIX_ATTEMPT", "4711.1")
    third = Lease(folder)
    third.acquire()
    third.release()
    assert told == []


def test_who_was_away_too_long_finds_out(folder, store, monkeypatch):
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 600.0)  # its renewals do not arrive
    first = Lease(folder)
    first.acquire()
    second = Lease(folder)
    second._watch(json.loads(store.get(newest(store))))
    edit(store, token="another", owner={"host": "node-8", "pid": 12})
    with pytest.raises(LeaseLostError, match=r"taken over by another job \(host node-8, process 12"):
        first.check()
    first.release()
    assert json.loads(store.get(newest(store)))["held"]  # of the other


def test_a_store_that_is_away_for_a_moment_does_not_end_a_lease(folder, store):
    held = Lease(folder)
    held.acquire()
    store.stop()
    store.start()
    renewed = threading.Event()
    store.refuse = lambda method, path: renewed.set() if method == "PUT" else False
    assert renewed.wait(60)
    held.check()
    held.release()
    assert not json.loads(store.get(newest(store)))["held"]


def test_a_renewal_that_hung_does_not_win_a_lost_lease_back(folder, monkeypatch, told):
    """It reaches the store after another job has waited for the lapse and taken the run."""
    monkeypatch.setattr(lease, "LAPSE_SECONDS", 0.5)
    hangs, goes_on, written = threading.Event(), threading.Event(), threading.Event()
    first, second = Lease(folder), Lease(RemoteFolder(folder.url))
    first.acquire()
    real = folder.write

    def write(name, content):
        hangs.set()
        goes_on.wait(30)
        real(name, content)
        written.set()

    monkeypatch.setattr(folder, "write", write)
    assert hangs.wait(10)
    second.acquire()
    goes_on.set()
    assert written.wait(10)
    second.check()
    with pytest.raises(LeaseLostError, match="was taken over by another job"):
        first.check()
    first.release()
    third = Lease(RemoteFolder(folder.url))
    with pytest.raises(ValueError, match="in use by another job"):
        third.acquire()
    second.release()
    told.clear()
    third.acquire()
    assert third.starts == 3
    third.release()
    assert told == []
