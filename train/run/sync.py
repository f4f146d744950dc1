"""A run at a URL, and the folder of this node that stands for it while ranks run. What they wrote there is uploaded
afterwards by the node's first rank, a checkpoint's manifest after all files of all nodes, which makes it whole."""

import json
import logging
import re
import shutil
from pathlib import Path

from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import RemoteError, RemoteFolder
from matmix.train.checkpoint.files import weight_files
from matmix.train.checkpoint.local_copies import RECORD
from matmix.train.checkpoint.manifest import find_wrong_size, list_files, matches, parse_manifest, read_manifest
from matmix.train.checkpoint.steps import MANIFEST, step_name, step_of
from matmix.train.process.heartbeat import beat
from matmix.train.run import lock
from matmix.train.run.lock import Lease

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
# Belongs to this node or to the store: locks, what is said of copies here, and files that are being written.
_OWN = re.compile(rf"(.*/)?(\.[^/]*|lock\.json|{re.escape(RECORD)}|[^/]*\.(tmp|part))|{lock.FOLDER}/.*")
# What launchers and ranks may leave before a run has begun.
_BEFORE_THE_RUN = re.compile(r"(logs|launch)/.*")
# What ranks on other nodes than the first write under names of their own.
_OF_RANKS = re.compile(r"logs/.*|launch/outcomes/[^/]*\.rank-\d+\.json")
# What every node needs of a run that it continues; the other records are for the first rank only.
_FOR_ALL = re.compile(r"[^/]+|tokenizer/.*")


class RunSync:
    """Moves files between a run's URL and this node's folder. Nothing here is collective. Methods that move files raise
    RemoteError (an OSError, one line) where the store fails."""

    def __init__(self, url: str, folder: Path, *, first: bool = True) -> None:
        """folder: this node's, see `outcome.local_folder`; first: whether rank 0 is on this node."""
        self.remote = RemoteFolder(url)
        self.lease = Lease(self.remote)
        self.url, self.folder, self.first = self.remote.url, folder, first
        self._stamp = folder.with_name(f"{folder.name}.json")
        self._sent: dict[str, tuple[int, int]] = {}

    # -- records: everything but the checkpoints ---------------------------------------------------------

    def check(self) -> None:
        """Raises ValueError if there is something at the URL, but no run."""
        names = [n for n in self.remote.sizes() if not _OWN.fullmatch(n) and not _BEFORE_THE_RUN.fullmatch(n)]
        if names and "config.toml" not in names:
            raise ValueError(f"run_dir {self.url} is not empty and not a run; choose another run_dir")

    def begin(self, starts: int) -> bool:
        """Brings the folder to where the run stands. starts: how often the run was started, this time included. The
        records in a folder that did not take part in the last start give way to those at the URL. Returns whether it
        did, so that its files are up to date."""
        try:
            took_part = json.loads(self._stamp.read_text(encoding="utf-8"))["starts"] == starts - 1
        except (OSError, ValueError, KeyError, TypeError):
            took_part = False
        self._stamp.unlink(missing_ok=True)
        if not took_part:
            self.forget_records()
        self.pull_records()
        self._stamp.write_text(json.dumps({"url": self.url, "starts": starts}), encoding="utf-8")
        return took_part

    def forget_records(self) -> None:
        """Removes the records here, but for the logs that ranks may be writing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in (CHECKPOINTS, "logs"):
                shutil.rmtree(path)
            elif path.is_file() and not _OWN.fullmatch(path.name):
                path.unlink()

    def pull_records(self) -> None:
        """Fetches the records that are not here; on other nodes than the first, those that all ranks need."""
        names = [name for name in self.remote.sizes() if not name.startswith((f"{CHECKPOINTS}/", "logs/"))]
        wanted = [name for name in names if not _OWN.fullmatch(name) and (self.first or _FOR_ALL.fullmatch(name))]
        self.remote.download_all([name for name in wanted if not (self.folder / name).exists()], self.folder)

    def push_records(self) -> None:
        """Uploads the records that changed since the last call; on other nodes than the first, those of its ranks."""
        files = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]
        records = [name for name in files if not name.startswith(f"{CHECKPOINTS}/") and not _OWN.fullmatch(name)]
        states = {n: (self.folder / n).stat() for n in records if self.first or _OF_RANKS.fullmatch(n)}
        stamps = {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}
        changed = dict(stamps.items() - self._sent.items())
        self.remote.upload_all(self.folder, changed)
        self._sent.update(changed)

    # -- checkpoints -------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        return self.folder / CHECKPOINTS / step_name(step)

    def at(self, step: int) -> RemoteFolder:
        """Returns the folder of a checkpoint at the URL."""
        return RemoteFolder(f"{self.url}/{CHECKPOINTS}/{step_name(step)}")

    def remote_steps(self) -> list[int]:
        """Returns the steps whose checkpoint was uploaded whole, in order."""
        return sorted(step for name, step in self._by_step() if name.endswith(f"/{MANIFEST}"))

    def _by_step(self) -> list[tuple[str, int]]:
        """Returns name and step of every file of the checkpoints at the URL."""
        steps = [(name, step_of(name.split("/")[1])) for name in self.remote.sizes(CHECKPOINTS) if name.count("/") > 1]
        return [(name, step) for name, step in steps if step is not None]

    def withdraw(self, step: int) -> None:
        """Makes a checkpoint at the URL invalid before other files take its place. Raises LeaseLostError."""
        self.lease.check()
        self.at(step).remove([MANIFEST])

    def push(self, step: int) -> None:
        """Uploads what this node has of a checkpoint, without the manifest, and the records."""
        own = [name for name in read_manifest(self.path(step))["files"] if (self.path(step) / name).is_file()]
        self.at(step).upload_all(self.path(step), own, lambda name: beat("an upload"))
        self.push_records()

    def publish(self, step: int) -> None:
        """Makes an uploaded checkpoint valid. Raises RemoteError if it is not whole at the URL, and LeaseLostError."""
        self.lease.check()
        remote, files = self.at(step), read_manifest(self.path(step))["files"]
        there = remote.sizes()
        if problem := find_wrong_size(files, there):
            raise RemoteError(f"{remote.url}/{problem} after its upload")
        remote.remove(sorted(there.keys() - files.keys() - {MANIFEST}))
        remote.upload(self.path(step) / MANIFEST, MANIFEST)

    def remove_all_but(self, steps: set[int]) -> None:
        """Removes the other checkpoints from the URL. Manifests go first: what is half removed is not valid."""
        gone = [name for name, step in self._by_step() if step not in steps]
        self.remote.remove(sorted(gone, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name)))

    def pull(self, step: int, *, weights_only: bool = False) -> str | None:
        """Fetches a checkpoint into this node's folder, but for files that are here already; every file is hashed once.
        weights_only: leaves files without weights where they are. Returns what is wrong with the checkpoint at the URL,
        in one line, or None; only then it has its manifest here."""
        target, remote = self.path(step), self.at(step)
        try:
            if (raw := remote.read(MANIFEST)) is None:
                raise ValueError(f"checkpoint {target} is not valid: it has no {MANIFEST}")
            manifest = parse_manifest(raw, target)
            files = manifest["files"]
            if problem := find_wrong_size(files, remote.sizes()):
                raise ValueError(f"checkpoint {target} is damaged: {problem}")
            target.mkdir(parents=True, exist_ok=True)
            (target / MANIFEST).unlink(missing_ok=True)
            for name in set(list_files(target)) - files.keys():
                (target / name).unlink()  # of another attempt at this step
            layout = manifest["layout"]
            wanted = weight_files(layout, files) if weights_only else list(files)
            if missing := [name for name in wanted if not matches(target / name, files[name])]:
                size = sum(files[name][0] for name in missing) / 1e6
                logger.info(f"fetching {size:,.1f} MB in {len(missing)} files of checkpoint {remote.url}")
            remote.download_all(missing, target, lambda name: beat("a download"))
            if damaged := [name for name in missing if not matches(target / name, files[name])]:
                raise ValueError(f"checkpoint {target} is damaged: {damaged[0]} does not match its checksum")
        except ValueError as error:
            return str(error).replace(f"checkpoint {target}", f"checkpoint {remote.url}")
        write_atomic(target / MANIFEST, raw)
        return None

    def outline(self, whole: bool) -> None:
        """Puts all checkpoints of the URL here: manifests, and other files, empty unless `whole`, of the right size."""
        sizes = self.remote.sizes(CHECKPOINTS)
        self.remote.download_all([n for n in sizes if whole or n.endswith(f"/{MANIFEST}")], self.folder)
        for name, size in sizes.items():
            if not (path := self.folder / name).exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.truncate(size)
