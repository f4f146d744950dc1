"""Where a run directory lies while ranks write to it.

A path is a name, which somebody may give to another folder while a run goes on: by moving the run directory away, by
putting another one in its place, or by another target of a symbolic link. Whoever then writes to the path makes a
second run directory of half a run. So every rank holds the folder itself open, and compares its number on the file
system with that of what lies at the path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from matmix.data.artifacts import shell_line
from matmix.data.storage.remote import is_url


class MovedError(ValueError):
    """The run directory is not at its path any more; the message says where it is, and what is saved in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """What has happened to a folder that is not at its path any more."""

    words: str
    to: str  # the path where it is now; "" where there is none, or none that this machine knows
    lost: bool = False  # it was removed, or cannot be reached here

    def says(self, run_dir: str, saved: int, steps: Sequence[int]) -> str:
        """One line for people. saved: the step that this start has saved last of all, 0 = it could not; steps: of the
        checkpoints in the folder."""
        newest = f"the newest checkpoint there is of step {steps[-1]}" if steps else "there is no checkpoint there"
        told = f"step {saved} is saved there" if saved else f"its last step could not be saved, {newest}"
        if self.lost:
            told = "nothing more can be saved there"
        if is_url(run_dir):
            return f"this node's folder of {run_dir} {self.words} while the run wrote to it; the same command goes on"
        again = f": {shell_line('matmix', 'train', self.to)} goes on" if steps and self.to else ""
        return f"run_dir {run_dir} {self.words} while the run wrote to it; {told}{again}"


class Place:
    """A folder that is known again wherever it is moved, once it is held."""

    def __init__(self, path: Path) -> None:
        self.given = path
        """What it is called, by everybody who does not look where it is now."""
        self._handle = -1

    def hold(self) -> None:
        """From now on it is the folder that is at the path now. Where there is none, or none that can be opened, or the
        file system has no lasting numbers for folders, nothing is noticed."""
        self.release()
        with contextlib.suppress(OSError):
            self._handle = os.open(self.given, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if self.is_elsewhere():
                self.release()

    def release(self) -> None:
        """Lets the folder go; `path` is the given one again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def is_elsewhere(self) -> bool:
        """Whether the folder that is held is not at the given path any more."""
        if self._handle < 0:
            return False
        try:
            return not os.path.samestat(os.stat(self.given), os.fstat(self._handle))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # a file system that is away says nothing about its folders

    @property
    def path(self) -> Path:
        """The folder's path now."""
        return (self._name or self.steady) if self.is_elsewhere() else self.given

    @property
    def steady(self) -> Path:
        """A path that leads to the folder wherever it is moved, in this process alone; where the system has none, the
        given one."""
        own = Path("/proc/self/fd", str(self._handle))
        return own if self._handle >= 0 and own.is_dir() else self.given

    @property
    def _name(self) -> Path | None:
        """Its path where it is elsewhere; None if it was removed, or moved by another machine."""
        with contextlib.suppress(OSError):
            name = os.readlink(self.steady)
            if os.path.samestat(os.stat(name), os.fstat(self._handle)):
                return Path(name)
        return None

    def moved(self) -> Moved | None:
        """What has happened to the folder if it is elsewhere."""
        if not self.is_elsewhere():
            return None
        name, replaced = self._name, os.path.lexists(self.given)
        removed = name is None and os.fstat(self._handle).st_nlink == 0
        lost = removed or self.steady == self.given
        if name is not None:
            what = f"was moved to {name}"
        elif removed:
            what = "was removed"
        else:
            what = "was moved, nobody here knows where to,"
        return Moved(f"{what} and replaced by another one" if replaced else what, str(name or ""), lost)
