"""What a killed process left in $TMPDIR is removed by the next start, and nothing of a living one or of others."""

import errno
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from matmix.train.process import node_folders

# Leaves what multiprocessing leaves: a folder, a named semaphore (without the tracker that would remove it), and, as
# torchrun does, a folder of reports beside. Then waits to be killed; a forked child waits with it where asked to.
PROCESS = """
import multiprocessing, multiprocessing.util, os, sys, tempfile, time
from matmix.train.process import node_folders
from matmix.train.process.console import begin_training
assert begin_training() == 0
from multiprocessing import resource_tracker
resource_tracker.register = resource_tracker.unregister = lambda *_: None
kept = multiprocessing.get_context("spawn").Semaphore(1)
folder = multiprocessing.util.get_temp_dir()
assert os.path.dirname(folder) == str(node_folders._own) == tempfile.gettempdir(), folder
tempfile.mkdtemp(prefix="other-")
if "fork" in sys.argv:
    if os.fork() == 0:
        time.sleep(600)
print(node_folders._own, kept._semlock.name, flush=True)
if "end" not in sys.argv:
    time.sleep(600)
"""


class Process:
    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        environment = {**os.environ, "TMPDIR": str(folder), "MATMIX_NODE_DISK": "", **variables}
        environment.pop("MATMIX_NODE_FOLDER", None)
        command = [sys.executable, "-P", "-c", PROCESS, *words]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        own, name = self.process.stdout.readline().split()
        self.folder, self.semaphore = Path(own), Path("/dev/shm") / f"sem.{name[1:]}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        time.sleep(0.2)  # the forked one


@pytest.fixture
def folder():
    """A temporary folder with a short name, as sockets need it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def start(folder):
    """`start(*words)`: a process that has left its files in a temporary folder of the test's."""
    started: list[Process] = []

    def call(*words: str, **variables: str) -> Process:
        started.append(Process(folder, *words, **variables))
        return started[-1]

    yield call
    for process in started:
        try:
            process.kill_all()
        except ProcessLookupError:
            process.process.wait()
        process.semaphore.unlink(missing_ok=True)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name.startswith(("pymp-", "other-", "torchelastic_")))


def test_the_next_start_removes_what_a_killed_process_left(start, folder):
    others = folder / "pymp-others"
    others.mkdir()
    killed, living = start(), start()
    killed.kill()
    assert killed.folder.is_dir()
    assert killed.semaphore.exists()
    ended = start("end")
    assert ended.process.wait() == 0
    assert not killed.folder.exists()
    assert not killed.semaphore.exists()
    assert not ended.folder.exists()
    assert living.folder.is_dir()
    assert living.semaphore.exists()
    assert others.is_dir()
    assert len(left(living.folder)) == 2


def test_what_a_forked_child_still_uses_stays(start):
    killed = start("fork")
    killed.kill()
    start("end").process.wait()
    assert killed.folder.is_dir()
    killed.kill_all()
    start("end").process.wait()
    assert not killed.folder.exists()


def test_reports_of_a_torchrun_that_is_dead_go_with_its_ranks(start, folder):
    """This process stands for torchrun: it lives, so its reports stay; then it is said to have been another one."""
    reports = folder / f"torchelastic_{secrets.token_hex(4)}"
    error = reports / "none_x" / "attempt_0" / "0" / "error.json"
    error.parent.mkdir(parents=True)
    rank = start(TORCHELASTIC_ERROR_FILE=str(error))
    rank.kill()
    start("end").process.wait()
    assert reports.is_dir()

    rank = start(TORCHELASTIC_ERROR_FILE=str(error))
    (note,) = rank.folder.glob(f"agent-{os.getpid()}-*")
    assert note.readlink() == reports
    note.rename(rank.folder / f"agent-{os.getpid()}-1000.0")
    rank.kill()
    start("end").process.wait()
    assert not reports.exists()


def test_a_long_tmpdir_is_not_for_sockets(tmp_path):
    """multiprocessing could make none there, and reading processes would wait for ever."""
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    code = (
        "import os; from multiprocessing.connection import Listener; "
        "from matmix.train.process.console import begin_training; assert begin_training() == 0; "
        "socket = Listener(); assert socket.address.startswith('/tmp/matmix-'); print(os.environ['TMPDIR'])"
    )
    environment = {**os.environ, "TMPDIR": str(deep), "MATMIX_NODE_DISK": ""}
    environment.pop("MATMIX_NODE_FOLDER", None)
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(deep), done.stderr


def test_without_locks_nothing_of_others_is_removed(folder, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setenv("MATMIX_NODE_FOLDER", str(folder / "node"))
    monkeypatch.setattr(node_folders, "_own", None)
    monkeypatch.setattr(node_folders.multiprocessing_util, "Finalize", lambda *_, **__: None)
    monkeypatch.setattr(node_folders.fcntl, "flock", flock)
    first = node_folders.make_own_folder()
    monkeypatch.setattr(node_folders, "_own", None)
    second = node_folders.make_own_folder()
    assert first != second
    assert first.is_dir()
