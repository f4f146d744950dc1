"""The output folder of a preparation: which process may write into it, and how far it has come.

While a preparation runs, the folder holds `.prepare/`: a lock, the options, the lengths of the documents of finished
shards, and a state: the position in the input, the counts, and the documents that wait for a shard. What was written
after the last state is written again, with the same bytes, when the preparation goes on.
"""

import contextlib
import io
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import filelock
import numpy as np

from matmix.data.artifacts import one_line, parse_json
from matmix.data.manifest import MANIFEST_NAME, Manifest
from matmix.data.prepare.base import SPLITS, BrokenInputError, Position, Progress
from matmix.data.splits.writer import SplitWriter
from matmix.data.storage.files import write_atomic

logger = logging.getLogger(__name__)

WORK_NAME = ".prepare"
PARTS_NAME = "parts"
# Files of a part beside those of a dataset: what it has read, and its sums.
PART_NAME, SUMS_NAME = "part.json", "sums.npy"


def compare_preparations(where: str | Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ValueError, with the differences, if the preparation at `where` is not the wanted one."""
    differences = [
        f"other {name}"
        if name in ("inputs", "contents_version")
        else f"{name} {there.get(name)!r} there, {wanted.get(name)!r} here"
        for name in sorted(there.keys() | wanted.keys())
        if there.get(name) != wanted.get(name)
    ]
    if there != wanted:
        raise ValueError(
            f"{where} holds another preparation ({'; '.join(differences)}); choose another output folder or delete "
            "that one"
        )


def parse_object(raw: bytes, where: object) -> dict[str, Any]:
    """Returns the object in a JSON file of a preparation. Raises ValueError (one line) if it is damaged."""
    values = parse_json(raw, where)
    if not isinstance(values, dict):
        raise ValueError(f"{where} is damaged: delete its folder and prepare again")
    return values


@contextlib.contextmanager
def locked(folder: Path, busy: str, *, wait: bool = False) -> Iterator[None]:
    """Keeps other processes out. busy: says that one is at work, for which this one waits or raises ValueError."""
    lock = filelock.FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise ValueError(busy) from None
        logger.info(busy)
        lock.acquire()
    except (OSError, NotImplementedError):
        logger.info(f"{folder} lies on a file system without locks: going on without")
    try:
        yield
    finally:
        lock.release()


class Workspace:
    """An output folder. Nothing is created before `filling`. wanted: the fingerprint of the preparation."""

    def __init__(self, out: str | Path, wanted: dict[str, Any]) -> None:
        self.out = Path(out).expanduser()
        self.work = self.out / WORK_NAME
        self.wanted = wanted

    def check(self) -> Literal["new", "unfinished", "finished"]:
        """Returns how far the preparation has come. Raises ValueError if the folder holds anything else."""
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file; choose another output folder")
        if (self.out / MANIFEST_NAME).exists():
            manifest = Manifest.load(self.out)
            compare_preparations(self.out, manifest.options, self.wanted)
            for split, info in manifest.splits.items():
                for shard in info.shards:
                    path = self.out / split / shard.file
                    if not path.is_file() or path.stat().st_size != shard.bytes:
                        raise ValueError(f"{path} is missing or damaged; delete {self.out} and prepare it again")
            return "finished"
        if (options := self.work / "options.json").exists():
            compare_preparations(self.out, parse_object(options.read_bytes(), options), self.wanted)
            return "unfinished"
        if (self.out / PARTS_NAME).exists():
            raise ValueError(
                f"{self.out} holds parts of a preparation (finish them with --part, join them with --merge); "
                "choose another output folder or delete that one"
            )
        if self.out.exists() and any(p.name != WORK_NAME for p in self.out.iterdir()):
            raise ValueError(
                f"{self.out} is not empty and holds no preparation of matmix; choose another output folder"
            )
        return "new"

    @contextlib.contextmanager
    def filling(self, *, is_new: bool, files: Sequence[str]) -> Iterator[bool]:
        """Keeps other processes out while the folder is brought to its end; gives False if one has done that. A user's
        error in a new preparation leaves nothing behind, unless it is a BrokenInputError: after any other one nothing
        here could be used again. files: names beside the splits."""
        made = not self.out.exists()
        self.work.mkdir(parents=True, exist_ok=True)
        with locked(self.work, f"another process is preparing {self.out} right now"):
            if not (self.work / "options.json").exists():
                write_atomic(self.work / "options.json", json.dumps(self.wanted).encode())
            try:
                yield self.check() != "finished"
            except (ValueError, FileNotFoundError) as error:
                if is_new and not isinstance(error, BrokenInputError):
                    for path in (self.out / name for name in (WORK_NAME, PART_NAME, SUMS_NAME, *SPLITS, *files)):
                        if path.is_dir():
                            shutil.rmtree(path)
                        else:
                            path.unlink(missing_ok=True)
                    if made and not any(self.out.iterdir()):
                        self.out.rmdir()
                raise
            except KeyboardInterrupt:
                logger.info(f"stopped; run the same command again to continue in {self.out}")
                raise

    def save(self, progress: Progress, writers: Mapping[str, SplitWriter], sums: np.ndarray) -> None:
        """Writes a state. sums: int64 (n,), those of `Preparation.add` over the input so far."""
        facts: dict[str, Any] = {"progress": asdict(progress), "splits": {}}
        arrays = {"sums": sums}
        for name, writer in writers.items():
            facts["splits"][name], pending = writer.state()
            arrays |= {f"{name}.{key}": value for key, value in pending.items()}
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomic(self.work / "state.npz", buffer.getvalue())

    def restore(self, writers: Mapping[str, SplitWriter], sums: np.ndarray, start: Position) -> Progress:
        """Brings writers and sums (in place) to the last state; without a state, work begins at `start`."""
        if not (path := self.work / "state.npz").exists():
            return Progress(position=start)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                facts = parse_json(arrays["facts"].tobytes(), "its JSON")
                sums[:] = arrays["sums"]
                for name, writer in writers.items():
                    writer.restore(facts["splits"][name], arrays[f"{name}.tokens"], arrays[f"{name}.lengths"])
            position = Position(**facts["progress"].pop("position"))
            progress = Progress(position=position, **facts["progress"])
        except Exception as error:  # a damaged archive gives errors of many kinds
            reason = one_line(f"{type(error).__name__}: {error}")
            raise ValueError(f"{path} is damaged ({reason}); delete {self.out} and prepare again") from None
        for writer in writers.values():
            writer.check()
        return progress
