"""The output folder of a preparation: who may write into it, and how far it has come.

While a preparation runs, the folder holds `.prepare/`: a lock, the options it was started with, the lengths
of the documents of finished shards, and a state. The state is one file, replaced as a whole from time to
time: the position in the input, the counts, and the documents that wait for a shard. What was written after
the last state is written again, with the same bytes, when the preparation goes on. `.prepare/` is removed
once the manifest is there.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import filelock
import numpy as np

from matmix.data.arrays import read_vector, write_vector
from matmix.data.artifacts import one_line, parse_json
from matmix.data.manifest import MANIFEST_NAME, Manifest
from matmix.data.prepare.config import OF_TRAINING, PrepareConfig
from matmix.data.prepare.documents import Malformed
from matmix.data.prepare.sources import Position, Source
from matmix.data.splits.writer import DamagedPreparationError, SplitWriter
from matmix.data.storage.files import write_atomic

logger = logging.getLogger(__name__)

WORK_NAME = ".prepare"
# Raise it when the same options give other bytes than before.
CONTENTS_VERSION = 1
KEPT_EXAMPLES = 100
SPLITS = ("train", "validation")
HISTOGRAM_NAME = "token_histogram.npy"
PARTS_NAME = "parts"
PART_NAME = "part.json"
# These say how to go about it, not what comes out.
_WITHOUT_EFFECT_ON_CONTENTS = (
    *("inputs", "out", "tokenizer", "processes", "max_line_megabytes", "max_malformed", "part", "tokenizer_only"),
)


@dataclass
class Progress:
    """How far the input was read, and what was met there."""

    position: Position = field(default_factory=Position)
    records: int = 0
    """Lines, rows or text documents looked at."""
    malformed: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    """File, line and reason of the first malformed records."""
    empty: int = 0
    spans: list[list[int]] = field(default_factory=list)
    """What was read, a stretch of a source each: source, first offset, last offset + 1, lines, records, documents."""

    def add_malformed(self, source: str, found: Sequence[Malformed], count: int) -> None:
        """Counts `count` malformed records of a source, and keeps the first ones of all."""
        self.malformed += count
        for one in found[: KEPT_EXAMPLES - len(self.examples)]:
            self.examples.append({"file": source, "line": one.line, "reason": one.reason})


def fingerprint(config: PrepareConfig, sources: Sequence[Source], tokenizer_sha256: str) -> dict[str, Any]:
    """What makes two preparations the same. Input files count by name, size and digest, not by folder."""
    left_out = (*_WITHOUT_EFFECT_ON_CONTENTS, *((*OF_TRAINING, "sample_megabytes") if tokenizer_sha256 else ()))
    wanted = {
        **{name: value for name, value in asdict(config).items() if name not in left_out},
        "tokenizer": tokenizer_sha256 or "trained",
        "inputs": [[Path(s.path).name, s.bytes, s.digest()] for s in sources],
        "contents_version": CONTENTS_VERSION,
    }
    return json.loads(json.dumps(wanted))


def compare_preparations(where: str | Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ValueError, with the differences, if what is at `where` is not the wanted preparation."""
    differences = "; ".join(
        f"other {name}"
        if name in ("inputs", "contents_version")
        else f"{name} {found.get(name)!r} there, {wanted.get(name)!r} here"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    )
    if found != wanted:
        raise ValueError(
            f"{where} holds another preparation ({differences}); choose another output folder or delete that one"
        )


@contextlib.contextmanager
def locked(folder: Path, busy: str, *, wait: bool = False) -> Iterator[None]:
    """Keeps other processes out. busy: what to say if one is at work, which is waited for or else a ValueError."""
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
    """An output folder. Nothing is created before `opened`."""

    def __init__(self, out: str, wanted: dict[str, Any]) -> None:
        self.out = Path(out).expanduser()
        self.work = self.out / WORK_NAME
        self.wanted = wanted
        self._made = False

    def check(self) -> Literal["new", "unfinished", "finished"]:
        """Raises ValueError if the folder holds anything but this preparation."""
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
    def opened(self) -> Iterator[None]:
        """Create the folder if needed, and keep other processes out of it. Raises ValueError if one is in it."""
        self._made = not self.out.exists()
        self.work.mkdir(parents=True, exist_ok=True)
        with locked(self.work, f"another process is preparing {self.out} right now"):
            if not (self.work / "options.json").exists():
                write_atomic(self.work / "options.json", json.dumps(self.wanted).encode())
            yield

    def fill(self, write: Callable[[], None], *, is_new: bool, kept: type[Exception]) -> bool:
        """Brings the folder to its end by `write`; False if another process has done so.

        A user's error in a new preparation leaves nothing behind, but for one of the kind `kept`: with other input or
        options this would be another preparation, and nothing here could be used again.
        """
        with self.opened():
            try:
                if self.check() == "finished":
                    return False
                write()
            except (ValueError, FileNotFoundError) as error:
                if is_new and not isinstance(error, kept):
                    self.discard()
                raise
            except KeyboardInterrupt:
                logger.info(f"stopped; run the same command again to continue in {self.out}")
                raise
        return True

    def clear_work(self) -> None:
        """Remove what only an unfinished preparation needs."""
        shutil.rmtree(self.work, ignore_errors=True)

    def discard(self) -> None:
        """Remove what a preparation puts into the folder, and the folder if `opened` made it."""
        for name in ("tokenizer", *SPLITS, WORK_NAME):
            shutil.rmtree(self.out / name, ignore_errors=True)
        for name in (HISTOGRAM_NAME, PART_NAME):
            (self.out / name).unlink(missing_ok=True)
        if self._made and not any(self.out.iterdir()):
            self.out.rmdir()

    def save(self, progress: Progress, writers: dict[str, SplitWriter], histogram: np.ndarray) -> None:
        """Writes a state. histogram: int64 (n,), sums over the input so far, such as how often each token occurs."""
        facts: dict[str, Any] = {"progress": asdict(progress), "splits": {}}
        arrays = {"histogram": histogram}
        for name, writer in writers.items():
            facts["splits"][name], parts = writer.state()
            arrays |= {f"{name}.{key}": value for key, value in parts.items()}
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomic(self.work / "state.npz", buffer.getvalue())

    def restore(self, writers: dict[str, SplitWriter], histogram: np.ndarray, start: Position) -> Progress:
        """Bring writers and histogram (in place) to the last state; if there is none, work begins at `start`."""
        if not (path := self.work / "state.npz").exists():
            return Progress(position=start)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                facts = parse_json(arrays["facts"].tobytes(), "its JSON")
                histogram[:] = arrays["histogram"]
                for name, writer in writers.items():
                    parts = {key: arrays[f"{name}.{key}"] for key in ("tokens", "lengths")}
                    writer.restore(facts["splits"][name], parts)
            progress = facts["progress"]
            progress.pop("documents_by_source", None)  # which earlier versions wrote
            return Progress(**{**progress, "position": Position(**progress["position"])})
        except DamagedPreparationError:
            raise
        except Exception as error:  # of a damaged archive, which has many kinds
            reason = one_line(f"{type(error).__name__}: {error}")
            raise ValueError(f"{path} is damaged ({reason}); delete {self.out} and prepare again") from None


def write_histogram(folder: Path, histogram: np.ndarray) -> None:
    """Write how often each token occurs in the training split, int64 (vocab_size,)."""
    write_vector(folder / HISTOGRAM_NAME, "int64", len(histogram), [histogram.tobytes()])


def read_histogram(folder: Path, vocab_size: int) -> np.ndarray:
    """What `write_histogram` wrote. Raises as `read_vector`."""
    path = folder / HISTOGRAM_NAME
    return read_vector(path, "int64", path, length=vocab_size)


def parse_object(raw: bytes, where: object) -> dict[str, Any]:
    """The object in a JSON file of a preparation. Raises ValueError (one line) if it is damaged."""
    values = parse_json(raw, where)
    if not isinstance(values, dict):
        raise ValueError(f"{where} is damaged: delete its folder and prepare again")
    return values
