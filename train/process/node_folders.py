"""Chooses this user's folders on the disk of this node: for compiled kernels, which are this user's alone because
whoever can write there can run code, and one of each process for temporary files of libraries."""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping
from multiprocessing import process as multiprocessing_process
from multiprocessing import util as multiprocessing_util
from pathlib import Path

import psutil

from matmix.data.storage.private import check_named, private_folder, standard_folder

FOLDER_VARIABLE = "MATMIX_NODE_FOLDER"
"""This user's folder on this node."""
DISK_VARIABLE = "MATMIX_NODE_DISK"
"""A folder on this node's own disk that the scheduler made for the job; without it, TMPDIR."""
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
# Names of sockets have at most 107 bytes; multiprocessing's are /pymp-12345678/listener-12345678 below the folder.
_LONGEST = 107 - 34

_own: Path | None = None


def node_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns this user's folder on this node's own disk: MATMIX_NODE_FOLDER, or one below the job's disk or TMPDIR.
    Raises as `private_folder` and `standard_folder`."""
    if given := environment.get(FOLDER_VARIABLE):
        return private_folder(given)
    base = environment.get(DISK_VARIABLE) or tempfile.gettempdir()
    return standard_folder(Path(base) / f"matmix-{os.getuid()}")


def cache_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of compilers with their folders on this node, without those that the user has set. Raises
    ValueError where the user's own folder cannot be trusted, and as `node_folder`."""
    chosen = {}
    for name, folder in _CACHES.items():
        if environment.get(name):
            check_named(environment[name], name)
        else:
            chosen[name] = str(private_folder(node_folder(environment) / folder))
    return chosen


def use_caches() -> None:
    """Sets these variables. Raises as `cache_variables`."""
    os.environ.update(cache_variables())


def use_own_folder() -> None:
    """Leads the libraries of this process to a folder of its own; where that name is too long for sockets, these alone
    to another. Raises as `make_own_folder`."""
    os.environ[FOLDER_VARIABLE] = str(node_folder())  # for processes that find another $TMPDIR in their environment
    folder = make_own_folder()
    # torchrun is no process of ours and makes its folder of reports before its ranks begin.
    parents = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    if reports := next((path for path in parents if path.name.startswith("torchelastic_")), None):
        with contextlib.suppress(psutil.Error):
            (folder / f"agent-{_life_of(os.getppid())}").symlink_to(reports)
    config = multiprocessing_process.current_process()._config
    if folder.is_relative_to(node_folder()):
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    else:
        config["tempdir"] = str(folder)
    config["semprefix"] = f"/mp-{folder.name}"


def make_own_folder() -> Path:
    """Returns a folder that is this process's own and goes with it. The process and the children that it forked hold
    its lock; folders of this user whose locks nobody holds are removed first. Raises ValueError or OSError."""
    global _own
    if _own is None:
        root = private_folder(_root())
        for path in root.glob("*.lock"):
            with contextlib.suppress(OSError), path.open("rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(root / path.stem)
                path.unlink()
        name, lock = _new_name(root)
        _own = root / name
        _own.mkdir(mode=0o700)
        # After multiprocessing itself has removed what it made; not in forked children.
        multiprocessing_util.Finalize(None, _remove_own, args=(lock,), exitpriority=-200)
    return _own


def _root() -> Path:
    """Returns where the folders of processes lie, with a name that is short enough."""
    # Nodes may share the folder, but not the locks in it: each looks after its own.
    name = f"t-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]}"
    root = node_folder() / name
    if len(os.fsencode(root / "12345678")) <= _LONGEST:
        return root
    try:
        return standard_folder(Path("/tmp") / f"matmix-{os.getuid()}") / name
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{root.parent} is too long a name for the sockets below it, and there is none in /tmp ({error}); set "
            "TMPDIR to a shorter path"
        ) from None


def _new_name(root: Path) -> tuple[str, int]:
    """Returns a name that no process has, and its lock, which is held. Without locks in the file system there is no
    file of this name either, and nobody removes the folder."""
    while True:
        name = secrets.token_hex(4)
        path = root / f"{name}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):
                return name, lock
        except (BlockingIOError, FileNotFoundError):
            pass  # somebody who cleans up holds it, or has just removed it
        except OSError:
            path.unlink(missing_ok=True)
            return name, lock
        os.close(lock)


def _remove_own(lock: int) -> None:
    global _own
    assert _own is not None
    _remove(_own)
    _own.with_name(f"{_own.name}.lock").unlink(missing_ok=True)
    os.close(lock)
    _own = None


def _remove(folder: Path) -> None:
    """Removes what a process that is gone left: its folder, its semaphores, and the reports of a dead torchrun."""
    for path in Path("/dev/shm").glob(f"sem.mp-{folder.name}-*"):
        path.unlink(missing_ok=True)
    for link in folder.glob("agent-*"):
        life = link.name.removeprefix("agent-")
        with contextlib.suppress(psutil.Error):
            if _life_of(int(life.partition("-")[0])) == life:
                continue  # it lives
        shutil.rmtree(link.readlink(), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _life_of(process: int) -> str:
    """Returns a word for a process that no later one of the same number has. Raises psutil.Error."""
    return f"{process}-{psutil.Process(process).create_time()}"
