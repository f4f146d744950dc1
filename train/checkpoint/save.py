"""One save: from what every rank holds to a directory that is a valid checkpoint, here or in the background."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from matmix.train import rng
from matmix.train.checkpoint.files import (
    GENERATORS,
    describe_files,
    list_files,
    sync_directory,
    together,
    write_manifest,
)
from matmix.train.engine.base import Engine
from matmix.train.engine.snapshot import Snapshot
from matmix.train.process.distributed import gather_objects, rank_and_world_size
from matmix.train.process.places import Place

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """All that this rank puts into a checkpoint."""

    step: int
    snapshot: Snapshot
    generators: dict[str, Any]
    layout: dict[str, Any]
    extra: dict[str, Any]

    @classmethod
    def collect(cls, step: int, engine: Engine, extra: dict[str, Any], *, copy: bool) -> Contents:
        """What there is now. copy: such that training may go on while it is written."""
        return cls(step, engine.snapshot(copy=copy), rng.get_state(), engine.layout(), deepcopy(extra))


def write_checkpoint(
    contents: Contents,
    temporary: Path,
    target: Path,
    group: dist.ProcessGroup | None = None,
    place: Place | None = None,
) -> str | None:
    """Writes into `temporary` and gives that the name `target`: until then no reader sees any of it.

    Each of its parts is done on all ranks before the next. None, or on every rank the complaint of the first
    one whose storage failed; then `temporary` may be left. group: as for `distributed.gather_objects`.
    place: which ranks share these folders, by default all. Where they do not, each folder gets what its ranks write
    and a manifest of all files.
    """
    rank, _ = rank_and_world_size()
    place = place or Place.shared()
    names: list[str] = []
    own: dict[str, list[int | str]] = {}

    def begin() -> None:
        if place.leads:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / GENERATORS).mkdir(parents=True)

    def write_generators() -> None:
        with (temporary / GENERATORS / f"rank-{rank:05d}.json").open("w", encoding="utf-8") as file:
            json.dump(contents.generators, file)
            file.flush()
            os.fsync(file.fileno())

    def write_snapshot() -> None:
        contents.snapshot.write(temporary, group)

    def list_all() -> None:
        names.extend(list_files(temporary) if place.leads else [])

    for action in (begin, write_generators, write_snapshot, list_all):
        if complaint := together(action, group):
            return complaint
    listed = {number: found for number, found in gather_objects((place.number, names), group) if found}
    share = listed[place.number][place.index :: place.count]
    if complaint := together(lambda: own.update(describe_files(temporary, share)), group):
        return complaint
    files = {name: entry for part in gather_objects(own, group) for name, entry in part.items()}

    def finish() -> None:
        if place.leads:
            head = {"step": contents.step, "written": time.time()}
            write_manifest(temporary, {**head, "layout": contents.layout, "extra": contents.extra, "files": files})
            for folder in {temporary, *(temporary / Path(name).parent for name in listed[place.number])}:
                sync_directory(folder)
            _put_in_place(temporary, target)

    return together(finish, group)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Renames; a damaged checkpoint of the same step goes only when the new one stands."""
    aside = target.parent / f".old-{target.name}"
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


class BackgroundSave:
    """A save in a thread of its own. What it has to say is kept until somebody listens."""

    def __init__(self, step: int, work: Callable[[Tell], bool], device: torch.device, *, local: bool = False) -> None:
        """work: does the save, is given what to tell with, and returns whether there is a checkpoint now; local: it is
        only a copy with the nodes."""
        self.step, self.local = step, local
        self._work, self._device = work, device
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._saved = False
        self._error: BaseException | None = None
        # A daemon: where the other ranks are gone it may wait for them long after this process has given up.
        self._thread = threading.Thread(target=self._run, name=f"save of step {step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # else this thread would open a context on the first device
            self._saved = self._work(self._messages.put)
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # and with it what it was writing

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def report(self, tell: Tell) -> None:
        """Passes on what it has said since the last time."""
        while True:
            try:
                text = self._messages.get_nowait()
            except queue.Empty:
                return
            tell(text)

    def join(self, tell: Tell) -> bool:
        """Waits for its end and returns whether there is a checkpoint now. Raises what it raised."""
        self._thread.join()
        self.report(tell)
        if self._error is not None:
            raise self._error
        return self._saved
