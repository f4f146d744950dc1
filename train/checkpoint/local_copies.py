"""Copies of the newest state with the nodes that made it, every few steps, so that a kill costs seconds.

    DIRECTORY/matmix-UID/NAME-HASH/HOST-0/step-00000057/     what the ranks of a node wrote, and its neighbour's

Every node has what its ranks write, the manifest of all, and what the node before it wrote, so that one lost node loses
none. A copy counts for the next start alone: each start gives the run a new name in RUN/local_copies.json, which stands
in its copies, so that what another course of the run has left on some node never comes back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from matmix.data.artifacts import artifact_path, parse_json, read_json
from matmix.data.storage.files import write_atomic
from matmix.data.storage.private import is_own, private_folder
from matmix.train.checkpoint.manifest import list_files, matches, read_manifest
from matmix.train.checkpoint.nodes import Transfer, exchange, free_bytes
from matmix.train.checkpoint.save import RankState, write_checkpoint
from matmix.train.checkpoint.steps import MANIFEST, list_steps, remove_checkpoint, step_name, step_of
from matmix.train.engine.base import Engine
from matmix.train.engine.kinds import files_of
from matmix.train.process import distributed
from matmix.train.process.distributed import FolderGroup, agree, complaint, from_rank_zero, gather_objects

if TYPE_CHECKING:
    from matmix.train.config import CheckpointConfig

logger = logging.getLogger(__name__)

RECORD = "local_copies.json"
START = "start"  # in what a copy holds besides the state: the name of the start that made it
_MEMORY = Path("/dev/shm")
_Kept = tuple[str, int | None]  # name of a start, and a step of it; None = any


class LocalCopies:
    """The copies of one run. Every method but `complete` is called on all ranks, by the thread that trains."""

    def __init__(self, run: str, record: Path, config: CheckpointConfig, *, up_to_date: bool = True) -> None:
        """run: its folder or URL; record: the file in its folder that names the start; config: without `local_every`,
        what earlier starts left is removed; up_to_date: on rank 0, whether the records here are the last start's."""
        self.record, self.peers, self.up_to_date = record, config.local_peers, up_to_date
        self.off = config.local_every == 0
        base = Path(config.local_dir).expanduser() if config.local_dir else _memory_folder()
        self._base = base / f"matmix-{os.geteuid()}"
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", run.rstrip("/").rsplit("/", 1)[-1])[:64]
        self._of_run = self._base / f"{stem}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self.folder = self._of_run  # of this node, once `_open` has looked who else is here
        self._node, self._is_first = FolderGroup.of_node(), distributed.rank_and_world_size()[0] == 0
        self._leaders: list[int] = []  # the rank that leads each node, in order of the nodes' numbers
        self._number = 0  # of this node in that order
        self.start = ""
        self._room_for = 0  # bytes of a copy for which there was room

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    # -- after a start -----------------------------------------------------------------------------------

    def newest(self, after: int, engine: Engine) -> Path | None:
        """Returns the newest copy of a step after `after` that the nodes hold whole between them; each node now has
        what its ranks need to load it. None if there is none; a line of warning names one that is not whole."""
        if self.off or not self._open():
            return None
        kept = from_rank_zero(self._read_record() if self._is_first else [])
        here = self._find(kept, after) if self._node.leads else {}
        everywhere = gather_objects({step: said for step, (said, _) in here.items()})
        for step in sorted({step for part in everywhere for step in part}, reverse=True):
            _, raw = here.get(step, ("", b""))
            try:
                self._bring(step, [part.get(step) for part in everywhere], raw, engine)
            except OSError as error:
                logger.warning(f"the node-local copy of step {step} is not used: {complaint(error)}")
            else:
                return self.path(step)
        return None

    def _read_record(self) -> list[_Kept]:
        """Returns which copies count: those of the last start, and the one that it began from."""
        try:
            record = read_json(self.record) if self.up_to_date else None
            kept = [(record["name"], None), *([tuple(record["origin"])] if record["origin"] else [])]
        except (OSError, ValueError, LookupError, TypeError):
            return []
        return kept if all(isinstance(name, str) for name, *_ in kept) else []

    def _find(self, kept: list[_Kept], after: int) -> dict[int, tuple[str, bytes]]:
        """Returns the copies here that count: step -> hash of what it says, the same on all nodes, and its manifest."""
        copies = {}
        for step in list_steps(self.folder):
            path = self.path(step)
            try:
                manifest, raw = read_manifest(path), (path / MANIFEST).read_bytes()
            except (ValueError, OSError):
                continue
            start = manifest["extra"].get(START)
            if step > after and ((start, None) in kept or (start, step) in kept):
                manifest["extra"].pop("goodput", None)  # each rank's own clock
                said = json.dumps([manifest[name] for name in ("layout", "extra", "files")], sort_keys=True)
                copies[step] = hashlib.sha256(said.encode()).hexdigest(), raw
        return copies

    def _bring(self, step: int, said: list[str | None], raw: bytes, engine: Engine) -> None:
        """Gives every node all that it needs of the copy of a step. said: the hash that each rank found; raw: the
        manifest that this one did. Raises OSError on all ranks that says what is wrong with the copy."""
        if len(set(filter(None, said))) > 1:
            raise OSError("the nodes hold different ones")
        path, rank = self.path(step), distributed.rank_and_world_size()[0]
        holder = next(holder for holder, value in enumerate(said) if value)
        raw = gather_objects(raw if rank == holder else b"")[holder]
        manifest = parse_json(raw, path)
        files, layout = manifest["files"], manifest["layout"]
        held = self._whole(path, files, list(files))
        # What arrived in part only, as a start before was killed, is brought again, and until then not read.
        agree(lambda: _remove(path, files.keys() - held[self._number]), here=self._node.leads)
        lost = [name for name in files if not any(name in names for names in held)]
        if lost:
            what = f"{len(lost)} of its {len(files)} files are damaged or with no node that is here"
            raise OSError(f"{what}, such as {lost[0]}")
        fits = layout["engine"] == engine.kind and layout["shapes"] == engine.shapes()
        reader = files_of(layout["engine"])
        shards = reader.shards(files) if fits else set()
        self._fetch(path, files, held, [files.keys() - shards] * len(held))
        if shards:
            try:
                tensors = dict(engine.named_tensors())
                wanted = agree(lambda: reader(path, layout).files_for(tensors))[rank]
            except ValueError as error:
                raise OSError(complaint(error)) from None
            self._fetch(path, files, held, [set().union(*parts) for parts in self._by_node(wanted)])
        there = (path / MANIFEST).is_file()
        agree(lambda: write_atomic(path / MANIFEST, raw), here=self._node.leads and not there)

    def _fetch(self, path: Path, files: dict[str, Any], held: list[set[str]], wanted: list[Collection[str]]) -> None:
        """Brings files to the nodes that want and lack them; held, wanted: by node. Raises OSError on all ranks."""
        transfers = []
        for count, name in enumerate(files):
            holders = [number for number, names in enumerate(held) if name in names]
            source = self._leaders[holders[count % len(holders)]]
            for number, leader in enumerate(self._leaders):
                if name in wanted[number] and number not in holders:
                    transfers.append(Transfer(name, files[name][0], source, leader))
        missing = [transfer.name for transfer in transfers if transfer.target == self._leaders[self._number]]

        def prepare() -> None:
            _require_room(self.folder, sum(files[name][0] for name in missing))
            path.mkdir(exist_ok=True)

        agree(prepare, here=self._node.leads)
        agree(lambda: exchange(path, transfers), here=self._node.leads)
        arrived = self._whole(path, files, missing)[self._number]
        if damaged := next(filter(None, gather_objects([name for name in missing if name not in arrived])), None):
            raise OSError(f"{damaged[0]} arrived damaged")

    def _whole(self, path: Path, files: dict[str, Any], names: list[str]) -> list[set[str]]:
        """Returns for each node which of these files it holds with the right checksum. Its ranks share the reading."""
        good = []
        for name in names[self._node.index :: self._node.count]:
            with contextlib.suppress(OSError, ValueError):  # cannot be read, or is a link: not held
                if matches(artifact_path(path, name, path, nested=True), files[name]):
                    good.append(name)
        return [set().union(*parts) for parts in self._by_node(good)]

    def follow(self, origin: Path | None) -> None:
        """Begins anew from the checkpoint `origin`, or from the beginning: no copy but that one, if it is one, counts
        from now on, and those on this node are removed."""
        kept = origin if origin is not None and origin.parent == self.folder else None
        if self.off or not self._open():
            if self._is_first:
                self.record.unlink(missing_ok=True)
            if self._node.leads and self._of_run.is_dir() and is_own(self._base):
                shutil.rmtree(self._of_run, ignore_errors=True)
            return
        self.start = from_rank_zero(uuid.uuid4().hex)
        before = None if kept is None else [read_manifest(kept)["extra"][START], step_of(kept.name)]
        record = json.dumps({"name": self.start, "origin": before}) + "\n"
        try:
            agree(lambda: write_atomic(self.record, record), here=self._is_first)
        except OSError as error:
            self.give_up(f"{self.record} cannot be written ({complaint(error)})")
        if self._node.leads:
            self._remove_all_but(kept)

    def end(self) -> None:
        """Removes the copies of a run that has saved all it did."""
        if not self._leaders:  # there never were any
            return
        if self._is_first:
            self.record.unlink(missing_ok=True)
        gather_objects(None)  # not before: copies that are there in part only would cost the next start a warning
        if self._node.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another node of this host still has its folder there
                self._of_run.rmdir()

    # -- while training ----------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Returns whether every node has room for two copies of such a `size`; else says that no more are made."""
        sizes = [sum(parts) for parts in self._by_node(size)]
        if self._shares:
            sizes = [own + sizes[number - 1] for number, own in enumerate(sizes)]
        if max(sizes) <= self._room_for:
            return True

        def look() -> None:
            there = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            _require_room(self.folder, max(sizes[self._number], 2 * sizes[self._number] - there))

        try:
            agree(look, here=self._node.leads)
        except OSError as error:
            self.give_up(f"{error.strerror or error}; checkpoint.local_dir names another place")
            return False
        self._room_for = max(sizes)
        return True

    def complete(self, state: RankState, group: dist.ProcessGroup | None) -> bool:
        """Writes a copy, shares it and removes the one before; in the background. Returns whether it is complete."""
        target = self.path(state.step)
        temporary = self.folder / f".tmp-{target.name}"
        try:
            write_checkpoint(state, temporary, target, group, self._node)
            if self._shares:
                self._share(target, group)
        except OSError as error:
            problem = complaint(error)
            logger.warning(f"no node-local copy of step {state.step}: {problem}; training goes on without them")
            if self._node.leads:
                shutil.rmtree(temporary, ignore_errors=True)
            return False
        if self._node.leads:
            self._remove_all_but(target)
        return True

    def _share(self, target: Path, group: dist.ProcessGroup | None) -> None:
        """Passes what each node wrote on to the next one. Raises OSError on all ranks where storage failed on one."""

        def look() -> tuple[int, dict[str, int]]:
            return self._number, {n: (target / n).stat().st_size for n in list_files(target) if n != MANIFEST}

        transfers = []
        for number, written in filter(None, agree(look, here=self._node.leads, group=group)):
            source, neighbour = self._leaders[number], self._leaders[(number + 1) % len(self._leaders)]
            transfers += [Transfer(name, size, source, neighbour) for name, size in written.items()]
        agree(lambda: exchange(target, transfers, group), here=self._node.leads, group=group)

    # -- nodes -------------------------------------------------------------------------------------------

    def _by_node(self, value: Any) -> list[list[Any]]:
        """Returns what the ranks of each node say, in the order of `_leaders`."""
        everywhere = gather_objects((self._number, value))
        return [[said for of, said in everywhere if of == number] for number in range(len(self._leaders))]

    @property
    def _shares(self) -> bool:
        return self.peers and len(self._leaders) > 1

    def _open(self) -> bool:
        """Finds the nodes, and makes this one's folder; returns whether all could."""
        if self._leaders:
            return True
        node, host = self._node, socket.gethostname()
        everywhere = gather_objects((node.number, node.index, node.count, host))
        firsts = {number: rank for rank, (number, index, *_) in enumerate(everywhere) if index == 0}
        counted = {(number, index) for number, _, count, _ in everywhere for index in range(count)}
        problem = "the launcher does not say which ranks share a node (GROUP_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE)"
        if sorted((number, index) for number, index, *_ in everywhere) == sorted(counted):
            # By the host's name: at the next start the nodes may be numbered otherwise.
            here = sorted({number for number, _, _, other in everywhere if other == host}).index(node.number)
            self.folder = self._of_run / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', host)}-{here}"
            problem = None
            try:
                for folder in (self._base, self._of_run, self.folder):
                    private_folder(folder)
            except (OSError, ValueError) as error:
                problem = f"{host}: {error}"
        if problem := next(filter(None, gather_objects(problem)), None):
            self.give_up(problem)
            return False
        self._leaders = [firsts[number] for number in sorted(firsts)]
        self._number = sorted(firsts).index(node.number)
        return True

    def give_up(self, problem: str) -> None:
        """Makes no more copies, and says why. Called on all ranks."""
        self.off = True
        logger.warning(f"no node-local copies: {problem}; training goes on without them")

    def _remove_all_but(self, kept: Path | None) -> None:
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            if path != kept:
                with contextlib.suppress(OSError):
                    remove_checkpoint(path)


def _remove(folder: Path, names: Collection[str]) -> None:
    """Removes files, but for those that a link leads to."""
    for name in names:
        with contextlib.suppress(ValueError):
            artifact_path(folder, name, folder, nested=True).unlink(missing_ok=True)


def _memory_folder() -> Path:
    """Returns a folder in this node's memory, where there is such a place, else one for temporary files."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _require_room(folder: Path, size: int) -> None:
    """Raises OSError unless `folder` takes so many bytes more."""
    if (free := free_bytes(folder)) < size:
        room = f"room for {free / 1e9:.3g} GB, not for the {size / 1e9:.3g} GB that are to be written there"
        raise OSError(f"{folder} on {socket.gethostname()} has {room}")
