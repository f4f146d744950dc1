"""Records of a part: written after every piece of work, and gone on with by whoever starts the part again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from matmix.benchmarks.compiling import HARDWARE, Compilation, compilation, compile_all, warm
from matmix.benchmarks.report import environment_of
from matmix.data.storage.files import set_aside, write_atomic
from matmix.kernels.launching import record_launches
from matmix.kernels.tiles import FOLDER, architecture

SAME = ("part", "device", "versions", "code", "tiles", "toy")
"""What has to be as it was for a record to be gone on with."""
ATTEMPTS = 2
"""How often a piece is begun that ends the process, or the device, each time."""
LEAST_SECONDS = 3.0
"""A piece of unknown length is begun if so much time is left."""
AHEAD = 48
"""Pieces whose kernels are compiled together before the first of them runs."""


class DeviceLost(Exception):
    """The device answers no more: what comes next has to run in another process."""


class OutOfTime(Exception):
    """A piece had to stop because the part's time was over; it is left, and not wrong."""


class Piece(NamedTuple):
    """Something to do whose result is kept under a name."""

    name: str
    run: Callable[[], dict[str, Any]]
    """Returns what is to be kept; "status" says what is wrong, if anything is."""
    dry: Callable[[], object] | None = None
    """Makes the launches that `run` will make, so that their kernels can be compiled side by side beforehand."""


class Record:
    """One start of a part: its JSON file, which says what each piece gave, and the time that is left."""

    def __init__(self, out: Path, part: str, device: torch.device, seconds: float, only: str = ""):
        """`only`: of pieces whose name contains this text. Raises ValueError for a file that is no record."""
        self.path, self.device, self.only = out / f"{part}.json", device, only
        self.toy = device.type == "cpu"
        self.end = time.monotonic() + seconds
        # A copy of the tree has no commit, but the same code gives the same digest anywhere. The sweep makes tiles.
        code = {"code": digest("*.py"), "tiles": digest("*.json") if part != "sweep" else ""}
        self.content: dict[str, Any] = {"part": part, "toy": self.toy, **environment_of(device), **code, "pieces": {}}
        if not self.path.exists():
            return
        try:
            before = json.loads(self.path.read_text(encoding="utf-8"))
            _ = before["pieces"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{self.path} is no record of a part; move it away or choose another --out") from None
        if not (changed := [name for name in SAME if before.get(name) != self.content[name]]):
            self.content = before
            return
        # What other code or another machine measured is kept beside what is measured now.
        aside = set_aside(self.path).name
        print(f"{self.path.name}: begun anew, as {' and '.join(changed)} changed; before: {aside}", flush=True)

    @property
    def pieces(self) -> dict[str, dict[str, Any]]:
        """What each piece gave, by its name: "status" is "ok", or says what is wrong; or it was only begun."""
        return self.content["pieces"]

    def has(self, name: str) -> bool:
        """Returns whether a piece is done, or was begun so often that it is given up."""
        piece = self.pieces.get(name, {})
        return "status" in piece or piece.get("begun", 0) >= ATTEMPTS

    def put(self, name: str, result: dict[str, Any] | None) -> None:
        """Keeps a piece's result; None: it is as if it had not been begun. The file is never half written."""
        self.pieces[name] = result
        if result is None:
            del self.pieces[name]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(self.content, indent=1) + "\n")

    def left(self) -> float:
        return self.end - time.monotonic()

    def wrong(self) -> list[str]:
        """Returns a line for each piece that is not as it should be."""
        ended = "ended its process"
        statuses = {n: x.get("status", ended if self.has(n) else "ok") for n, x in self.pieces.items()}
        return [f"{name}: {status}" for name, status in statuses.items() if status not in ("ok", "left out")]

    def work(self, pieces: Iterable[Piece], show: Callable[[dict], str] = lambda result: "") -> list[str]:
        """Does what the record does not hold yet, as long as there is time; returns the names of what is left.

        A piece is begun only if there is as much time left as the longest one took. What it raises is written down as
        its status. Raises `DeviceLost` where the device itself has failed.
        """
        todo = [piece for piece in pieces if self.only in piece.name and not self.has(piece.name)]
        longest, ahead = LEAST_SECONDS, 0
        while todo and self.left() >= longest:
            if ahead == 0:
                compile_ahead(todo[:AHEAD], self.device)
                ahead = AHEAD
            piece, start = todo[0], time.monotonic()
            self.put(piece.name, {"begun": self.pieces.get(piece.name, {}).get("begun", 0) + 1})
            try:
                result = survived(piece.run)
            except OutOfTime:
                self.put(piece.name, None)
                break
            seconds = time.monotonic() - start
            longest, ahead = max(longest, 1.2 * seconds), ahead - 1
            self.put(piece.name, result | {"took_seconds": round(seconds, 2)})
            line = show(result) if result["status"] == "ok" else result["status"]
            print(f"{piece.name:<70} {line}", flush=True)
            todo.pop(0)
        return [piece.name for piece in todo]

    def run_process(self, command: list[str], most: float, without: tuple[str, ...], **options: Any) -> Any:
        """Returns what a process ended with that has at most so many seconds, and no variables whose names begin with
        those in `without`. Raises `OutOfTime` where the part's own time is over before."""
        limit = max(5.0, min(most, self.left() - 3))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        options |= {"env": environment, "capture_output": True, "text": True}
        try:
            return subprocess.run(command, timeout=limit, **options)
        except subprocess.TimeoutExpired:
            if limit < most:
                raise OutOfTime from None
            raise RuntimeError(f"took longer than {limit:.0f} s") from None


def digest(pattern: str) -> str:
    """Returns a digest of the kernels' files that match: their names and contents."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.parent.rglob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def compile_ahead(pieces: list[Piece], device: torch.device) -> None:
    """Compiles the kernels of these pieces for the GPU that is there, in as many processes as there are cores."""
    target = architecture(device)
    jobs: dict[str, tuple[str, Compilation]] = {}
    for piece in pieces if target in HARDWARE else ():
        if piece.dry is not None:
            # What is raised here `run` will meet and say. Tensors of one piece are gone before those of the next.
            with contextlib.suppress(Exception), record_launches() as launches:
                piece.dry()
            jobs |= {job.key: (job.key, job) for job in (compilation(launch, target) for launch in launches)}
            del launches
    try:
        for _ in compile_all(jobs, how=warm) if jobs else ():
            pass
    except Exception as error:  # a compiler that ended its process; each piece then compiles for itself
        print(f"kernels could not be compiled ahead: {error}", flush=True)


def survived(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what a piece gave, or why it failed. Raises `DeviceLost` if the device answers no more, and
    `OutOfTime`."""
    try:
        return {"status": "ok"} | run()
    except OutOfTime:
        raise
    except torch.OutOfMemoryError:
        status = "out of memory"
    except Exception as error:  # a finding about the kernels that ran
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        status = f"failed: {type(error).__name__}: {first[:200]}"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            raise DeviceLost(status) from error
    return {"status": status}
