"""What the checkpoints of a run hold and whether they are whole, found in one process and without a model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from matmix.train.checkpoint.files import MANIFEST, check_sizes, find_problem, read_manifest
from matmix.train.checkpoint.manager import LEFTOVERS, CheckpointManager
from matmix.train.engine.kinds import files_of
from matmix.train.tasks import unit_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """One checkpoint. What its manifest would say is None where that cannot be read."""

    path: Path
    step: int
    problem: str | None  # what is wrong with it, one line; None = whole
    size: int  # bytes on disk
    tokens: int | None = None  # seen by the run until then; or what else `unit` says
    unit: str = "tokens"
    engine: str | None = None  # who wrote it, such as "torch" or "deepspeed, ZeRO-2"
    ranks: int | None = None  # that wrote it
    written: float | None = None  # seconds since the epoch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The folder `checkpoints` of a run."""

    checkpoints: list[CheckpointFacts]  # by step
    leftovers: list[str]  # names of unfinished saves and removals, which no reader looks at

    @property
    def resumed(self) -> CheckpointFacts | None:
        """The one with which the run would go on, as far as was looked."""
        return next((facts for facts in reversed(self.checkpoints) if facts.problem is None), None)

    @property
    def damaged(self) -> list[CheckpointFacts]:
        return [facts for facts in self.checkpoints if facts.problem is not None]


def list_checkpoints(directory: str | Path, *, verify: bool = False) -> Listing:
    """Everything in a run's folder `checkpoints`; a run may be writing to it meanwhile.

    verify: read every file and compare its checksum; without it only presence and sizes are looked at.
    """
    directory = Path(directory)
    manager = CheckpointManager(directory)
    found = []
    for step in manager.steps():
        facts = _describe(manager.path(step), step, verify)
        # Else the run has removed it while we were reading.
        if facts.path.is_dir():
            found.append(facts)
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    return Listing(checkpoints=found, leftovers=[name for name in names if name.startswith(LEFTOVERS)])


def _describe(path: Path, step: int, verify: bool) -> CheckpointFacts:
    facts = CheckpointFacts(path=path, step=step, problem=_problem(path, verify), size=_size(path))
    try:
        manifest = read_manifest(path)
        return dataclasses.replace(
            facts,
            tokens=manifest["extra"].get("train_state", {}).get("tokens"),
            unit=unit_of(str(manifest["extra"].get("config", {}).get("objective", {}).get("name"))),
            engine=files_of(manifest["layout"]["engine"]).title(manifest["layout"]),
            ranks=manifest["layout"].get("world_size"),
            written=manifest.get("written", (path / MANIFEST).stat().st_mtime),
        )
    except (ValueError, KeyError, AttributeError, OSError):
        return facts


def _problem(path: Path, verify: bool) -> str | None:
    try:
        if verify:
            return find_problem(path)
        check_sizes(path)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except OSError:  # removed meanwhile
                continue
    return total
