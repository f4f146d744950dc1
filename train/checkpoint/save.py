"""One save: from what every rank holds to a directory that is a valid checkpoint, here or in the background."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from matmix.data.artifacts import read_json
from matmix.data.storage.files import open_durable, sync_directory
from matmix.train.checkpoint.lanes import Lanes, write_lanes
from matmix.train.checkpoint.manifest import GENERATORS, describe_files, list_files, write_manifest
from matmix.train.engine.base import Engine, Snapshot
from matmix.train.process.distributed import FolderGroup, agree


@dataclasses.dataclass(frozen=True, slots=True)
class RankState:
    """All that this rank puts into a checkpoint."""

    step: int
    snapshot: Snapshot
    batch_rank: int
    generators: dict[str, Any] | None  # None where another rank has the same
    data_rank: int
    lanes: dict[str, torch.Tensor]  # {} where nothing is carried, or another rank has the same
    layout: dict[str, Any]
    extra: dict[str, Any]

    @classmethod
    def collect(
        cls, step: int, engine: Engine, extra: dict[str, Any], *, copy: bool, lanes: Lanes | None = None
    ) -> RankState:
        """Collects what there is now. copy: such that training may go on while it is written."""
        mesh, own, carried = engine.mesh, None, {}
        if mesh.is_counted:
            own, carried = generator_states(), lanes.tensors() if lanes and not mesh.part.number else {}
        snapshot, layout = engine.snapshot(copy=copy), engine.layout()
        return cls(step, snapshot, mesh.batch_rank, own, mesh.data_rank, carried, layout, deepcopy(extra))


def write_checkpoint(
    state: RankState, temporary: Path, target: Path, group: dist.ProcessGroup | None, folder: FolderGroup
) -> None:
    """Writes into `temporary` and gives that the name `target`: until then no reader sees any of it. Each part is done
    on all ranks before the next.

    group: as for `distributed.gather_objects`. folder: which ranks share these folders; where not all do, each gets
    what its ranks write and a manifest of all files. Raises OSError on every rank where the storage of one failed; then
    `temporary` may be left.
    """

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / GENERATORS).mkdir(parents=True)

    def write() -> None:
        if state.generators is not None:
            with open_durable(temporary / GENERATORS / f"rank-{state.batch_rank:05d}.json") as file:
                file.write(json.dumps(state.generators).encode())
        if state.lanes:
            write_lanes(state.lanes, temporary, state.data_rank)

    agree(begin, here=folder.leads, group=group)
    agree(write, group=group)
    agree(lambda: state.snapshot.write(temporary, group), group=group)
    listed = agree(lambda: (folder.number, list_files(temporary)), here=folder.leads, group=group)
    names = dict(filter(None, listed))[folder.number]
    described = agree(lambda: describe_files(temporary, names[folder.index :: folder.count]), group=group)
    files = {name: entry for part in described for name, entry in part.items()}

    def finish() -> None:
        head = {"step": state.step, "written": time.time()}
        write_manifest(temporary, {**head, "layout": state.layout, "extra": state.extra, "files": files})
        for path in {temporary, *(temporary / Path(name).parent for name in names)}:
            sync_directory(path)
        _put_in_place(temporary, target)

    agree(finish, here=folder.leads, group=group)


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


class BackgroundSave(NamedTuple):
    """A save in a thread of its own."""

    step: int
    local: bool  # it is only a copy with the nodes
    saved: Future[bool]  # whether there is a checkpoint, once it has ended

    @classmethod
    def begin(cls, step: int, work: Callable[[], bool], device: torch.device, *, local: bool = False) -> BackgroundSave:
        """work: does the save, and returns whether there is a checkpoint now."""
        saved: Future[bool] = Future()

        def run() -> None:
            nonlocal work
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # else this thread would open a context on the first device
                saved.set_result(work())
            except BaseException as error:
                saved.set_exception(error)
            finally:
                del work  # and with it what it was writing

        # A daemon: where the other ranks are gone it may wait for them long after this process has given up.
        threading.Thread(target=run, name=f"save of step {step}", daemon=True).start()
        return cls(step, local, saved)


# -- random generators -----------------------------------------------------------------------------------


def seed_all(seed: int, rank: int) -> None:
    """Seeds Python, NumPy and torch (every device of this process), differently on every rank."""
    words = np.random.SeedSequence([seed, rank]).generate_state(4)
    random.seed(int(words[0]) << 32 | int(words[1]))
    np.random.seed(int(words[2]))
    torch.manual_seed(int(words[0]) << 31 ^ int(words[3]))


def generator_states() -> dict[str, Any]:
    """Returns the states of Python's, NumPy's and torch's generators (CPU, and the CUDA device in use) for JSON."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def set_generators(state: dict[str, Any]) -> None:
    """Puts the generators back to a state from `generator_states`; without CUDA in use its part is left out."""
    random.setstate(_python_state(state))
    np.random.set_state(_numpy_state(state))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def read_generators(directory: Path, batch_rank: int) -> tuple[dict[str, Any], bool]:
    """Returns the state for this rank's generators, and whether it is its own; batch_rank: `Mesh.batch_rank`, by which
    the files are numbered. Raises ValueError (one line) where `set_generators` would stop half-way."""
    own = directory / f"rank-{batch_rank:05d}.json"
    path = own if own.is_file() else directory / "rank-00000.json"
    state = read_json(path)
    try:
        random.Random().setstate(_python_state(state))
        np.random.RandomState().set_state(_numpy_state(state))
        torch.Generator().set_state(_decode(state["torch"]))
        _decode(state.get("cuda", ""))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{path} is damaged: it holds no state of random generators ({text})") from None
    return state, path == own


def restore_generators(generators: tuple[dict[str, Any], bool], batch_rank: int) -> None:
    """Puts this rank's generators back to what `read_generators` returned."""
    state, is_own = generators
    set_generators(state)
    if not is_own:
        # A rank that the saved run did not have: a stream of its own, fixed by the checkpoint.
        seed_all(int(torch.randint(2**62, ()).item()), batch_rank)


def _python_state(state: dict[str, Any]) -> tuple[Any, ...]:
    version, numbers, gauss = state["python"]
    return version, tuple(numbers), gauss


def _numpy_state(state: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state["numpy"]
    return name, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
