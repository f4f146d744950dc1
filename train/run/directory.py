"""The run directory: config.toml, tokenizer/, checkpoints/, metrics.jsonl, messages.log, summary.json and others."""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import read_json, read_json_lines, shell_line
from matmix.data.storage.files import set_aside, write_atomic
from matmix.data.storage.remote import is_url
from matmix.data.tokenizer import Tokenizer
from matmix.train.checkpoint import local_copies
from matmix.train.checkpoint.local_copies import LocalCopies
from matmix.train.checkpoint.manager import CheckpointManager, Store
from matmix.train.config import CheckpointConfig, RunConfig
from matmix.train.recipe import config_from_dict, config_to_dict, differences, with_defaults, write_config
from matmix.train.recipe_files import read_toml
from matmix.train.run.outcome import local_folder

logger = logging.getLogger(__name__)

# What may change when a run is started again: how it is watched, spread and kept, and how the steps to come are made;
# nothing that defines the model, the batches or the meaning of the optimizer's state.
# (Engines whose checkpoints have another layout are refused when the checkpoint is loaded.)
_MAY_CHANGE = (
    *("run_dir", "device", "stop_step", "micro_batch_size", "max_bad_steps", "gc_every"),
    *("logging.", "checkpoint.", "evaluation.", "engine.", "faults.", "callback"),
    *("data.workers", "data.worker_start", "data.prefetch", "data.verify", "data.cache_dir"),
    *("data.cache_gigabytes", "data.skip_damaged"),
    # The checkpoint knows its data by their contents, wherever they lie.
    *("data.path", "data.validation_path", "data.images.path", "data.images.validation_path"),
    *("data.synthetic.validation_samples", "data.synthetic.eval_lengths"),
    *("steps", "epochs", "schedule.", "optimizer.lr", "optimizer.weight_decay", "optimizer.max_grad_norm"),
    *("optimizer.embedding_lr", "optimizer.mixer_rules", "optimizer.rule", "ema."),
)
_MAY_NOT_CHANGE = ("engine.precision",)
_OF_ONE_START = ("stop_step", "checkpoint.start_over", "run_dir")  # a run that was moved has not changed
_NEVER = object()
_MOST_CHANGES = 6  # that one message shows
SAVED = "saved.json"
LOG = "messages.log"
TRACKED = "trackers.json"
"""The run's names at other services, as callbacks keep them."""
Change = tuple[str, Any, Any]  # dotted key, value before, value now
# What may lie in a run directory before the run has begun.
_BEFORE_THE_RUN = frozenset({"launch", "logs", "lock.json", "train.log", LOG, ".config.toml.tmp"})


class RunDirectory:
    """A run on disk."""

    up_to_date = True
    """True where the records are here as the last start left them."""

    def __init__(self, path: str | Path) -> None:
        """path: a folder, or a URL, for which this node's folder stands (`run.remote` fills it)."""
        self.url = str(path) if is_url(path) else None
        self.place = Place(local_folder(path))

    @property
    def path(self) -> Path:
        """The folder, also where it was moved to while it is held."""
        return self.place.path

    @property
    def where(self) -> str:
        """The name that the user knows it by."""
        return self.url or str(self.path)

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def curves(self) -> Path:
        """The picture of the run, once it has ended."""
        return self.path / "curves.png"

    def read_config(self) -> RunConfig:
        """The config of an existing run. Raises FileNotFoundError or ValueError."""
        if not self.path.is_dir():
            raise FileNotFoundError(f"run directory not found: {self.path}")
        if not self.config_path.is_file():
            raise ValueError(f"{self.path} is not a run directory: it has no config.toml")
        return config_from_dict(read_toml(self.config_path), str(self.config_path))

    def tokenizer_sha256(self) -> str | None:
        """Hash of the tokenizer the run was started with, None before its start."""
        folder = self.path / "tokenizer"
        return Tokenizer.load(folder).sha256 if folder.is_dir() else None

    def check(self, config: RunConfig) -> None:
        """Raises ValueError if the directory holds something other than a run of `config` (showing the difference)."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"run_dir {self.path} is a file; choose another run_dir")
        if not self.config_path.is_file():
            # Launchers and ranks, and a start that was killed at once, do not make it somebody else's.
            if any(entry.name not in _BEFORE_THE_RUN for entry in self.path.iterdir()):
                raise ValueError(f"run_dir {self.where} is not empty and not a run; choose another run_dir")
            return
        text = refused_changes(differences(config_to_dict(self.read_config()), config))
        if text:
            advice = "choose another --run-dir, or start that config again to resume it"
            raise ValueError(f"run_dir {self.where} belongs to a run with another config ({text}); {advice}")

    def changes_since(self, saved: dict[str, Any], config: RunConfig) -> list[Change]:
        """Returns what `config` changes of that in a checkpoint of this run, whose `extra` is `saved`. Raises
        ValueError (one line) for what may not change: then config.toml was edited by hand."""
        changes = differences(with_defaults(saved["config"]), _of_the_run(config))
        if text := refused_changes(changes):
            problem = f"{self.config_path} is not the config that the run's checkpoint was made with ({text})"
            raise ValueError(f"{problem}: put the old values back, or choose another --run-dir")
        return [change for change in changes if change[0] not in _OF_ONE_START]

    def begin(self, config: RunConfig, step: int, tokenizer: Tokenizer | None, changes: Sequence[Change] = ()) -> None:
        """Makes the directory and writes the resolved config and the tokenizer (rank 0 only). changes: those to the
        checkpoint's config, which are told and go into changes.jsonl with `step`, the last one done."""
        self.path.mkdir(parents=True, exist_ok=True)
        config = _of_the_run(config)
        if changes:
            _note(self.path / "changes.jsonl", changes, step)
        if not self.config_path.is_file() or differences(config_to_dict(self.read_config()), config):
            write_config(config, self.config_path)
        folder, temporary = self.path / "tokenizer", self.path / ".tokenizer.tmp"
        if tokenizer is not None and not folder.is_dir():  # a copy: runs outlive the datasets they were trained on
            shutil.rmtree(temporary, ignore_errors=True)
            tokenizer.save(temporary)
            temporary.rename(folder)
        if changes:
            listed = ", ".join(f"{key} {old} -> {new}" for key, old, new in changes)
            logger.info(f"continuing with changes: {listed}")

    def checkpoint_manager(self, config: CheckpointConfig) -> CheckpointManager:
        """The run's checkpoints."""
        where, record = self.url or str(self.path.resolve()), self.path / local_copies.RECORD
        copies = LocalCopies(where, record, config, up_to_date=self.up_to_date)
        options = {name: getattr(config, name) for name in ("keep_last", "keep_every", "start_over")}
        return CheckpointManager(self.store(config.keep_last), record=self.path / SAVED, copies=copies, **options)

    def store(self, keep_last: int) -> Store:
        """The place of the run's checkpoints."""
        return Store(self.checkpoints)

    def lead(self, checkpoints: CheckpointManager) -> None:
        """Makes `checkpoints` write to and remove from the folder that is held, whatever lies at its path."""
        steady = self.place.steady
        checkpoints.store.directory, checkpoints.record = steady / self.checkpoints.name, steady / SAVED
        if checkpoints.copies is not None:
            checkpoints.copies.record = steady / local_copies.RECORD

    def set_aside_records(self) -> None:
        """Makes room for the records of a run that begins again."""
        for name in ("metrics.jsonl", "summary.json", "changes.jsonl", SAVED, TRACKED):
            if (path := self.path / name).exists():
                logger.info(f"moved {name} to {set_aside(path).name}: the run begins again at step 0")

    def read_summary(self) -> dict[str, Any] | None:
        """Returns what `write_summary` wrote; None where that is missing or damaged: then the run ends once more."""
        try:
            summary = read_json(self.path / "summary.json")
        except (FileNotFoundError, ValueError):
            return None
        sound = isinstance(summary, dict) and isinstance(summary.get("step"), int)
        return summary if sound and isinstance(summary.get("validation"), dict) else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes what says that the run is finished; where the storage fails, a warning says so."""
        try:
            write_atomic(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            logger.warning(f"no summary written ({error}); the same command tries again")


def refused_changes(changes: Iterable[Change]) -> str:
    """Returns the changes of a config that make it another run's, for a message; "" where there are none."""
    tables = tuple(key for key in _MAY_CHANGE if key.endswith("."))
    texts = []
    for key, *values in changes:
        if key in _MAY_NOT_CHANGE or not (key in _MAY_CHANGE or key.startswith(tables)):
            old, new = ("{...}" if isinstance(value, dict) else repr(value) for value in values)
            texts.append(f"{key}: {old} there, {new} here")
    more = [f"and {len(texts) - _MOST_CHANGES} more"] if len(texts) > _MOST_CHANGES else []
    return "; ".join(texts[:_MOST_CHANGES] + more)


def check_tokenizer(saved: dict[str, Any], tokenizer: Tokenizer | None, checkpoint: Path) -> None:
    """Raises ValueError unless `tokenizer` is the one in a checkpoint's `extra`; None = the data holds no tokens."""
    wanted = str(saved.get("tokenizer_sha256"))
    if tokenizer is not None and wanted != tokenizer.sha256:
        here, there = f"{tokenizer.path} (SHA-256 {tokenizer.sha256[:12]})", wanted[:12]
        raise ValueError(f"{here} is not the tokenizer that {checkpoint} was trained with ({there}): put that back")


def _of_the_run(config: RunConfig) -> RunConfig:
    """Returns `config` without what belongs to one start of a run."""
    return dataclasses.replace(config, stop_step=0, checkpoint=dataclasses.replace(config.checkpoint, start_over=False))


def _note(path: Path, changes: Iterable[Change], step: int) -> None:
    """Appends changes to a file, but for those that it has as its newest: a start that was killed said them already."""
    told = {entry.get("key"): entry.get("new") for entry in read_json_lines(path) if entry.get("step") == step}
    with path.open("a", encoding="utf-8") as file:
        for key, old, new in changes:
            if told.get(key, _NEVER) != new:
                entry = {"time": time.time(), "step": step, "key": key, "old": old, "new": new}
                file.write(json.dumps(entry) + "\n")


# -- where a run directory lies while ranks write to it --------------------------------------------------


class MovedError(ValueError):
    """The run directory is not at its path any more; the message says where it is, and what is saved in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Says what has happened to a folder that is not at its path any more."""

    words: str
    to: str  # the path where it is now; "" where there is none, or none that this machine knows
    lost: bool = False  # it was removed, or cannot be reached here

    def says(self, run_dir: str, saved: int, steps: Sequence[int]) -> str:
        """Returns one line for people. saved: the last step that this start saved, 0 = none; steps: with a checkpoint
        there."""
        newest = f"the newest checkpoint there is of step {steps[-1]}" if steps else "there is no checkpoint there"
        told = f"step {saved} is saved there" if saved else f"its last step could not be saved, {newest}"
        if self.lost:
            told = "nothing more can be saved there"
        if is_url(run_dir):
            return f"this node's folder of {run_dir} {self.words} while the run wrote to it; the same command goes on"
        again = f": {shell_line('matmix', 'train', self.to)} goes on" if steps and self.to else ""
        return f"run_dir {run_dir} {self.words} while the run wrote to it; {told}{again}"


class Place:
    """A folder that is known again wherever it is moved, once it is held.

    Whoever writes to the path of a run directory that somebody moved away, or replaced, makes a second one of half a
    run. So every rank holds the folder open, and compares its number with that of what lies at the path.
    """

    def __init__(self, path: Path) -> None:
        self.given = path
        """The path by which everybody knows it who does not look where it is now."""
        self._handle = -1

    def hold(self) -> None:
        """Holds the folder that is at the path now. Where that cannot be, no move is noticed."""
        self.release()
        with contextlib.suppress(OSError):
            self._handle = os.open(self.given, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if self.is_elsewhere():
                self.release()

    def release(self) -> None:
        """Lets the folder go; `path` is the given one again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def is_elsewhere(self) -> bool:
        """Returns whether the folder that is held is not at the given path any more."""
        if self._handle < 0:
            return False
        try:
            return not os.path.samestat(os.stat(self.given), os.fstat(self._handle))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # a file system that is away says nothing about its folders

    @property
    def path(self) -> Path:
        """The folder's path now."""
        return (self._name or self.steady) if self.is_elsewhere() else self.given

    @property
    def steady(self) -> Path:
        """A path that leads to the folder wherever it is moved, in this process alone, or else the given one."""
        own = Path("/proc/self/fd", str(self._handle))
        return own if self._handle >= 0 and own.is_dir() else self.given

    @property
    def _name(self) -> Path | None:
        """Its path where it is elsewhere; None if it was removed, or moved by another machine."""
        with contextlib.suppress(OSError):
            name = os.readlink(self.steady)
            if os.path.samestat(os.stat(name), os.fstat(self._handle)):
                return Path(name)
        return None

    def moved(self) -> Moved | None:
        """Returns what has happened to the folder if it is elsewhere."""
        if not self.is_elsewhere():
            return None
        name, replaced = self._name, os.path.lexists(self.given)
        removed = name is None and os.fstat(self._handle).st_nlink == 0
        lost = removed or self.steady == self.given
        moved_away = "was moved, nobody here knows where to," if name is None else f"was moved to {name}"
        what = "was removed" if removed else moved_away
        return Moved(f"{what} and replaced by another one" if replaced else what, str(name or ""), lost)
