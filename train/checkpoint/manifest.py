"""Says which directory is a valid checkpoint: its last file, `checkpoint.json`, and that all others are as it says.

It is written after everything else, and the directory gets its name after that. What happens to it later, hashes tell:
the file holds the SHA-256 of every other one, and begins with one over all that it says itself. This guards against
accidents; who can write to a checkpoint can also write hashes that fit.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from matmix.data.artifacts import artifact_name, artifact_path, parse_json
from matmix.data.storage.files import open_durable
from matmix.train.checkpoint.steps import LEFTOVERS, MANIFEST, list_steps, step_name, step_of
from matmix.train.engine.config import COUNTS, title
from matmix.train.process.heartbeat import beat

GENERATORS = "generators"
FIRST_GENERATORS = f"{GENERATORS}/rank-00000.json"
VERSION = 2
_HEAD, _AFTER_ROOT = b'{\n "root": "', b'",'
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 22
OF_DAMAGE = (errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO))
"""What reading says where the medium or the file system has lost the content of a file."""


def list_files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def describe_files(directory: Path, names: list[str]) -> dict[str, list[int | str]]:
    """Returns size and SHA-256 of files below `directory`."""
    return {name: [(directory / name).stat().st_size, sha256(directory / name)] for name in names}


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content in hexadecimal digits."""
    value = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value.update(chunk)
            beat("reading a checkpoint")
    return value.hexdigest()


def matches(path: Path, entry: list[int | str]) -> bool:
    """Returns whether a file is there and as an entry of `describe_files` says."""
    size, value = entry
    return path.is_file() and path.stat().st_size == size and sha256(path) == value


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes `checkpoint.json`: JSON whose first member, the root, is the SHA-256 of all bytes that follow it."""
    rest = {name: value for name, value in manifest.items() if name not in ("root", "version")}
    body = json.dumps({"version": VERSION, **rest}, indent=1).removeprefix("{").encode() + b"\n"
    with open_durable(directory / MANIFEST) as file:
        file.write(_HEAD + hashlib.sha256(_AFTER_ROOT + body).hexdigest().encode() + _AFTER_ROOT + body)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint. Raises FileNotFoundError for no such folder, or as `parse_manifest`."""
    if not directory.is_dir():
        raise FileNotFoundError(f"checkpoint not found: {directory}")
    try:
        return parse_manifest((directory / MANIFEST).read_bytes(), directory)
    except FileNotFoundError:
        raise ValueError(f"checkpoint {directory} is not valid: it has no {MANIFEST}") from None


def parse_manifest(raw: bytes, directory: Path) -> dict[str, Any]:
    """Returns the manifest that `raw` holds. Raises ValueError (one line) for a wrong root, form or directory name."""
    damaged = f"checkpoint {directory} is damaged: its {MANIFEST}"
    end = len(_HEAD) + 64
    if raw.startswith(_HEAD) and hashlib.sha256(raw[end:]).hexdigest().encode() != raw[len(_HEAD) : end]:
        raise ValueError(f"{damaged} is not what was written (its root hash does not match)")
    try:
        manifest = parse_json(raw, MANIFEST)
        version = manifest["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{damaged} cannot be read") from None
    if version != VERSION or type(version) is not int:
        raise ValueError(f"checkpoint {directory} was written by another version of matmix: update one of the two")
    if not raw.startswith(_HEAD):
        raise ValueError(f"{damaged} has lost its root hash")
    try:
        problem = _find_fault(manifest, directory.name)
    except ValueError as error:
        problem = f"cannot be right: {error}"
    if problem is not None:
        raise ValueError(f"{damaged} {problem}")
    return manifest


def _find_fault(manifest: dict[str, Any], name: str) -> str | None:
    """Says what is wrong with the form of a manifest. Raises ValueError for names of files that lead elsewhere."""
    files, step, layout = (manifest.get(key) for key in ("files", "step", "layout"))
    if type(step) is not int or step < 0 or not isinstance(manifest.get("extra"), dict):
        return "lacks its step, or what the training loop saved"
    if not isinstance(layout, dict) or not _is_layout(layout):
        return "has no layout of its tensors"
    if (named := step_of(name.removeprefix(".tmp-"))) is not None and named != step:
        return f"is of step {step}, not {named}: the directory has another's name"
    if not isinstance(files, dict) or FIRST_GENERATORS not in files:
        return "does not list its files"
    for name, entry in files.items():
        artifact_name(name, "it", nested=True)
        sound = isinstance(entry, list) and len(entry) == 2 and _are_counts(entry[:1])
        if not sound or not (isinstance(entry[1], str) and _SHA256.fullmatch(entry[1])):
            return "does not say how long its files are and what their checksums"
    return None


def _is_layout(layout: dict[str, Any]) -> bool:
    """Returns whether this is what engines say of the tensors that they write."""
    kind, shapes = layout.get("engine"), layout.get("shapes")
    moments, other = layout.get("moments", {}), layout.get("moment_shapes", {})
    if not isinstance(kind, str) or kind not in COUNTS or not layout.get("world_size"):
        return False
    if not all(isinstance(table, dict) for table in (shapes, moments, other)):
        return False
    lists = [[layout.get(name) for name in ("world_size", *COUNTS[kind])], *shapes.values(), *other.values()]
    return all(map(_are_counts, lists)) and all(isinstance(entries, list) for entries in moments.values())


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(number) is int and number >= 0 for number in values)


def find_wrong_size(files: Mapping[str, list], sizes: Mapping[str, int]) -> str | None:
    """Says which of a manifest's `files` is missing or not as long as it was; sizes: of the files that are there."""
    for name, (size, _) in files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            how = "truncated" if sizes[name] < size else "too long"
            return f"{name} is {how} ({sizes[name]} of {size} bytes)"
    return None


def check_sizes(directory: Path, names: Collection[str] | None = None) -> None:
    """Raises ValueError if a file is missing or not as long as it was; names: look at these files only."""
    files = read_manifest(directory)["files"]
    wanted = files if names is None else {name: files[name] for name in names}
    paths = {name: artifact_path(directory, name, directory / MANIFEST, nested=True) for name in wanted}
    problem = find_wrong_size(wanted, {name: path.stat().st_size for name, path in paths.items() if path.is_file()})
    if problem is not None:
        raise ValueError(f"checkpoint {directory} is damaged: {problem}")


# -- listing ---------------------------------------------------------------------------------------------


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


def list_checkpoints(directory: str | Path, *, verify: Callable[[Path], str | None] | None = None) -> Listing:
    """Lists what is in a run's folder `checkpoints`, to which a run may be writing. Imports no torch. verify: says what
    is wrong with a checkpoint, as `find_problem` does, which reads every file; without it, only sizes are looked at."""
    directory = Path(directory)
    checkpoints = []
    for step in list_steps(directory):
        facts = _describe(directory / step_name(step), step, verify)
        # Else the run has removed it while we were reading.
        if facts.path.is_dir():
            checkpoints.append(facts)
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    return Listing(checkpoints=checkpoints, leftovers=[name for name in names if name.startswith(LEFTOVERS)])


def _describe(path: Path, step: int, verify: Callable[[Path], str | None] | None) -> CheckpointFacts:
    problem, size, said = None, 0, {}
    try:
        problem = check_sizes(path) if verify is None else verify(path)
    except (ValueError, OSError) as error:
        problem = str(error)
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                size += (Path(folder) / name).stat().st_size
    with contextlib.suppress(ValueError, KeyError, AttributeError, OSError):  # what it says is not known
        manifest = read_manifest(path)
        layout, extra = manifest["layout"], manifest["extra"]
        if (unit := extra.get("unit")) is None:
            from matmix.train.tasks import unit_of  # late: tasks import torch

            unit = unit_of(str(extra.get("config", {}).get("objective", {}).get("name")))
        writer = {"engine": title(layout), "ranks": layout["world_size"], "written": manifest["written"]}
        said = {"tokens": extra.get("train_state", {}).get("tokens"), "unit": unit, **writer}
    return CheckpointFacts(path=path, step=step, problem=problem, size=size, **said)
