"""Folders for caches and temporary files that no other user can have made or may write to.

Their places can be guessed, and who owns such a folder can replace what is in it: compiled code and its pickles,
shards, the ends of links. So one that is there already is looked at before it is used.
"""

import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def private_folder(path: str | Path, *, close: bool = False) -> Path:
    """Returns `path` as a folder of this user's own, made with its parents (0700) if it is not there.

    close: take a group's right to write from a folder of one's own, in place of refusing it; not for code. Raises
    ValueError (one line) where it is a link, belongs to somebody else, or others may write to it or replace it; OSError
    where it cannot be made.
    """
    path = Path(path).expanduser().absolute()
    if problem := _problem_above(path):
        raise ValueError(problem)
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                if not folder.is_dir():  # else another process of ours was faster, or another user
                    raise
    state = path.lstat()
    if close and stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & stat.S_IWOTH:
        path.chmod(stat.S_IMODE(state.st_mode) & ~stat.S_IWGRP)
    if problem := _problem(path):
        raise ValueError(problem)
    return path


def is_own(path: Path) -> bool:
    """Returns True where `path` is a folder of this user's own or not there yet."""
    return not os.path.lexists(path) or (path.lstat().st_uid == os.geteuid() and not path.is_symlink())


def standard_folder(path: str | Path) -> Path:
    """Returns `private_folder(path)`, or, where that cannot be trusted, another folder that is made once and then kept,
    of which a warning tells. For places that nobody chose. Raises ValueError or OSError where there is none."""
    path = Path(path)
    try:
        return private_folder(path)
    except ValueError as error:
        reason = error
    for base in (path.parent, Path(tempfile.gettempdir()), Path("/tmp")):
        if base.is_dir() and os.access(base, os.W_OK) and not _problem_above(base / path.name):
            known = sorted(base.glob(f"{path.name}-{'?' * 8}"))
            own = next((other for other in known if not _problem(other)), None)
            own = own or Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=base))
            if os.environ.get("RANK", "0") == "0":
                logger.warning(f"{reason}; {own} is used in its place")
            return own
    raise reason


def check_named(path: str | Path, name: str) -> None:
    """Raises ValueError (one line) for a folder for caches that the user has named, if anybody may write to it. One
    that a group shares is the user's decision."""
    path = Path(path).expanduser().absolute()
    problem = _problem_above(path)
    if not problem and path.exists():
        state = path.stat()
        if state.st_mode & stat.S_IWOTH:
            problem = f"every user may write to {path}"
        elif state.st_uid not in (0, os.geteuid()):
            problem = f"{path} belongs to {_user(state.st_uid)}"
    if problem:
        raise ValueError(f"{name} = {path} cannot be trusted: {problem}; name a folder of your own")


def _problem(path: Path) -> str:
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode):
        return f"{path} is a link or no folder"
    if state.st_uid != os.geteuid():
        return f"{path} belongs to {_user(state.st_uid)}"
    mode = stat.S_IMODE(state.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {path} (mode {mode:o}; chmod go-w after a look at what it has)"
    return ""


def _problem_above(path: Path) -> str:
    """Returns why anybody may rename a folder above `path`, "" if nobody; a sticky bit, as of /tmp, forbids it."""
    for folder in path.parents:
        if folder.exists():
            mode = folder.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"every user may replace what is in {folder}"
    return ""


def _user(number: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
