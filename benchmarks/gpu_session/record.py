"""Records of a part: written after every piece of work, and gone on with by whoever starts the part again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from matmix.benchmarks.compiling import HARDWARE, Compilation, compilation, warmed
from matmix.benchmarks.kernels.resources import compile_all
from matmix.benchmarks.measuring.settings import device_name
from matmix.benchmarks.peers.packages import HOW
from matmix.data.storage.files import write_atomic
from matmix.kernels.launching import record_launches
from matmix.kernels.tiles import FOLDER, architecture
from matmix.launch.lab.measuring import environment

SAME = ("part", "device", "versions", "code", "tiles", "toy")
"""What has to be as it was for a record to be gone on with."""
KERNELS = FOLDER.parent
ATTEMPTS = 2
"""How often a piece is begun that ends the process, or the device, each time."""
LEAST_SECONDS = 3.0
"""A piece of unknown length is begun if so much time is left."""

AHEAD = 48
"""Pieces whose kernels are compiled together before the first of them runs."""


def digest(paths: Iterable[Path]) -> str:
    """Of files' names and contents; the same whatever order they come in."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


class DeviceLost(Exception):
    """The device answers no more: what comes next has to run in another process."""


class OutOfTime(Exception):
    """A piece had to stop because the part's time was over; it is left, and not wrong."""


class Record:
    """The JSON file of one part: where and with what it was measured, and what each piece found."""

    def __init__(self, path: Path, part: str, device: torch.device, *, toy: bool, tiles: bool = True):
        """`toy`: at sizes for the interpreter; `tiles`: whether the measured tile sizes matter for what it holds."""
        self.path = path
        where = environment(distributions=("triton", *HOW)) | {"device": device_name(device)}
        del where["dtype"]
        # A copy of the tree has no commit, but the same code gives the same digest anywhere.
        code = {"code": digest(KERNELS.rglob("*.py")), "tiles": digest(KERNELS.rglob("*.json")) if tiles else None}
        self.content: dict[str, Any] = {"part": part, "toy": toy, **where, **code, "pieces": {}}
        if path.exists():
            self._go_on()

    def _go_on(self) -> None:
        try:
            before = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{self.path} is no record of a part; move it away or choose another --out") from None
        if not isinstance(before, dict) or "pieces" not in before:
            raise ValueError(f"{self.path} is no record of a part; move it away or choose another --out")
        changed = [name for name in SAME if before.get(name) != self.content[name]]
        if not changed:
            self.content = before
            return
        # What other code or another machine measured is kept beside what is measured now.
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}-before-{number}.json")).exists():
            number += 1
        self.path.rename(aside)
        print(f"{self.path.name}: begun anew, as {' and '.join(changed)} changed; before: {aside.name}", flush=True)

    @property
    def pieces(self) -> dict[str, dict[str, Any]]:
        """What each piece found, by its name: "status" is "ok", or says what is wrong; or it was only begun."""
        return self.content["pieces"]

    def has(self, name: str) -> bool:
        """Whether a piece is done, or was begun so often that it is given up."""
        piece = self.pieces.get(name, {})
        return "status" in piece or piece.get("begun", 0) >= ATTEMPTS

    def begin(self, name: str) -> None:
        """A piece is begun: if its process does not come back, the file says so."""
        self.pieces[name] = {"begun": self.pieces.get(name, {}).get("begun", 0) + 1}
        self.write()

    def tries_to_compile(self, first: str) -> bool:
        """Whether kernels of the pieces from this one on should be compiled ahead: not where that never came back."""
        tries = self.content.setdefault("compiled_ahead", {})
        tries[first] = tries.get(first, 0) + 1
        self.write()
        return tries[first] <= ATTEMPTS

    def undo(self, name: str) -> None:
        """A piece that was begun is as if it had not been."""
        del self.pieces[name]
        self.write()

    def put(self, name: str, found: dict[str, Any]) -> None:
        """A piece is done."""
        self.pieces[name] = found
        self.write()

    def write(self) -> None:
        """The file is the old or the new one, never half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(self.content, indent=1) + "\n")

    def wrong(self) -> list[str]:
        """Of what is not as it should be, a line each."""
        lines = []
        for name, piece in self.pieces.items():
            status = piece.get("status", "ended its process" if piece.get("begun", 0) >= ATTEMPTS else "ok")
            if status not in ("ok", "left out"):
                lines.append(f"{name}: {status}")
        return lines


class Limit:
    """The time that a part may take."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


class Piece(NamedTuple):
    """Something to do whose result is kept under a name."""

    name: str
    run: Callable[[], dict[str, Any]]
    """Returns what is to be kept."""
    dry: Callable[[], object] | None = None
    """Makes the launches that `run` will make; called while launches are recorded and none is run, so that their
    kernels can be compiled side by side beforehand."""


class Session(NamedTuple):
    """One start of one part."""

    device: torch.device
    out: Path
    """The folder of the records."""
    toy: bool
    """Sizes for Triton's interpreter."""
    limit: Limit
    only: str = ""
    """Pieces whose name contains this text."""

    def record(self, part: str, *, tiles: bool = True) -> Record:
        """The record of a part."""
        return Record(self.out / f"{part}.json", part, self.device, toy=self.toy, tiles=tiles)

    def work(self, record: Record, pieces: Iterable[Piece], show: Callable[[dict], str] | None = None) -> list[str]:
        """Do what the record does not hold yet, as long as there is time; returns the names of what is left.

        A piece is begun only if there is as much time left as the longest one took. What it raises is written down as
        its status. Raises `DeviceLost` where the device itself has failed.
        """
        todo = [x for x in pieces if self.only in x.name and not record.has(x.name)]
        longest, longest_ahead = LEAST_SECONDS, LEAST_SECONDS
        while todo:
            batch = todo[:AHEAD]
            if self.limit.left() < longest + longest_ahead:
                break
            start = time.monotonic()
            if record.tries_to_compile(batch[0].name):
                compile_ahead(batch, self.device)
            longest_ahead = max(longest_ahead, 1.2 * (time.monotonic() - start))
            for piece in batch:
                if self.limit.left() < longest:
                    return [x.name for x in todo]
                record.begin(piece.name)
                start = time.monotonic()
                try:
                    found = survived(piece.run)
                except OutOfTime:
                    record.undo(piece.name)
                    return [x.name for x in todo]
                seconds = time.monotonic() - start
                longest = max(longest, 1.2 * seconds)
                record.put(piece.name, found | {"took_seconds": round(seconds, 2)})
                line = show(found) if show and found["status"] == "ok" else found["status"]
                print(f"{piece.name:<70} {line}", flush=True)
                todo.remove(piece)
        return [x.name for x in todo]


def compile_ahead(pieces: list[Piece], device: torch.device) -> None:
    """Compile the kernels of these pieces for the GPU that is there, in as many processes as there are cores."""
    target = architecture(device)
    if target not in HARDWARE:
        return
    jobs: dict[str, tuple[str, Compilation]] = {}
    for piece in pieces:
        if piece.dry is not None:
            # What is raised here `run` will meet and say. Tensors of one piece are gone before those of the next.
            with contextlib.suppress(Exception), record_launches() as found:
                piece.dry()
            for job in (compilation(launch, target) for launch in found):
                jobs[job.key] = job.key, job
            del found
    try:
        for _ in compile_all(jobs, len(os.sched_getaffinity(0)), warmed):
            pass
    except Exception as error:  # a compiler that ended its process; each piece then compiles for itself
        print(f"kernels could not be compiled ahead: {error}", flush=True)


def survived(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a piece found, or why it failed. Raises `DeviceLost` if the device answers no more, and `OutOfTime`."""
    try:
        return {"status": "ok"} | run()
    except OutOfTime:
        raise
    except torch.OutOfMemoryError:
        found = {"status": "out of memory"}
    except Exception as error:  # a finding about the kernels that ran
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        found = {"status": f"failed: {type(error).__name__}: {first[:200]}"}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            raise DeviceLost(found["status"]) from error
    return found
