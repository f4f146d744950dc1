"""Two jobs on one run directory: the second is told who is there; nothing stays behind when the first dies."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from runs import losses, run_recipe

from matmix.train.run.lock import RunLock

# Holds the lock until it is told to go or killed; its forked child lives on, as a reading process may.
_HOLDER = """
import multiprocessing, sys, time
from matmix.train.run.lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
fork = multiprocessing.get_context("fork")
begun = fork.Event()
child = fork.Process(target=lambda: begun.set() or time.sleep(600))
child.start()
begun.wait()  # a child lets go of the lock as its first act
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path, and the number of its child."""
    environment = {**os.environ, "MATMIX_ATTEMPT": "4711.0"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
    )  # fmt: skip
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_the_second_job_is_told_who_the_first_is(holder, tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(ValueError, match="in use by another job") as error:
        lock.acquire()
    message = str(error.value)
    assert "\n" not in message
    for word in (os.uname().nodename, str(holder.pid), "attempt 4711.0", "since 20"):
        assert word in message


def test_the_lock_ends_with_its_holder_though_a_child_lives_on(holder, tmp_path):
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path)
    lock.acquire()
    assert lock.owner()["pid"] == os.getpid()
    lock.release()


def test_a_requeued_job_waits_until_its_last_attempt_is_gone(holder, tmp_path, monkeypatch, told):
    monkeypatch.setenv("MATMIX_ATTEMPT", "4711.1")
    told.then = holder.kill  # only once we wait
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    assert len(told) == 1
    assert "waiting" in told[0]
    assert "4711.0" in told[0]


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_locks_costs_one_warning(dataset, tmp_path, monkeypatch, capsys):
    def flock(handle, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert run_recipe("debug_mru", dataset, tmp_path / "run", "--steps", "2").finished
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "no locks on the file system" in warnings[0]


@pytest.mark.slow
def test_a_second_run_in_the_same_place_refuses_and_harms_nothing(dataset, tmp_path, monkeypatch):
    from matmix.train import loop

    true_step, complaints = loop.Trainer.train_step, []

    def step(trainer, batches):
        if trainer.state.step == 3 and not complaints:
            second = threading.Thread(target=start_again)
            second.start()
            second.join()
        true_step(trainer, batches)

    def start(name):
        # Without dropout, which draws from generators that the two, here in one process, share.
        run_recipe("debug_mru", dataset, tmp_path / name, "--model.dropout", "0")

    def start_again():
        try:
            start("run")
        except ValueError as error:
            complaints.append(str(error))

    start("alone")
    monkeypatch.setattr(loop.Trainer, "train_step", step)
    start("run")
    assert len(complaints) == 1
    assert f"process {os.getpid()}" in complaints[0]
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    assert json.loads((tmp_path / "run" / "lock.json").read_text())["host"] == os.uname().nodename


def test_a_start_that_was_killed_before_the_run_began_is_not_in_the_way(dataset, tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    lock.release()
    (tmp_path / "run" / ".config.toml.tmp").write_text("run_d")
    assert run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "1").step == 1
