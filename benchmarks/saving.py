"""`saving`: what a checkpoint costs against the size of the model."""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from matmix.benchmarks.report import columns, save
from matmix.data.loading.batch import Batch
from matmix.launch.lab.measuring import environment, prepare
from matmix.model import ModelConfig
from matmix.train.checkpoint.local_copies import RECORD, LocalCopies
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.config import CheckpointConfig, ObjectiveConfig
from matmix.train.engine.base import Engine
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.optim.config import OptimizerConfig
from matmix.train.process.distributed import Distributed, barrier, from_rank_zero
from matmix.train.tasks.token_prediction import CausalLM

_VOCABULARY, _LAYERS, _TOKENS = 8192, 8, 16


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a checkpoint costs against the size of the model: the stall of training, the save, and reading it again.

    Saves in the background and blocking saves take turns, so that whatever else the machine does hits both alike;
    medians are reported. The checkpoint is dropped from the page cache before it is read: a resume reads it twice, for
    its checksums and to load it, and finds it in the cache the second time. Under torchrun it measures all ranks
    together.
    """

    sizes: str = "10M,30M,100M"
    """Numbers of parameters."""
    repeats: int = 5
    """Of each kind."""
    engine: Literal["fsdp2", "ddp", "deepspeed"] = "fsdp2"
    zero_stage: Literal[0, 1, 2, 3] = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    directory: Path | None = None
    """Where to write; default: a temporary folder."""
    json: Path | None = None
    """Also write the numbers here."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        sizes = [parse_size(text) for text in self.sizes.split(",")]
        if self.repeats < 1:
            raise ValueError(f"--repeats {self.repeats}: must be 1 or more")
        with Distributed.from_environment(self.device) as distributed:
            folder = Path(from_rank_zero(tempfile.mkdtemp(dir=self.directory) if distributed.rank == 0 else ""))
            try:
                rows = [self.measure(distributed, size, folder / str(size)) for size in sizes]
            finally:
                if distributed.rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
        if distributed.rank == 0:
            print(table(rows))
            if self.json:
                engine = dataclasses.asdict(self.engine_config)
                ran = {"ranks": distributed.world_size, "engine": engine, "repeats": self.repeats}
                save({"environment": environment(), "device": str(distributed.device), **ran, "sizes": rows}, self.json)
        return 0

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(name=self.engine, zero_stage=self.zero_stage)

    def measure(self, distributed: Distributed, parameters: int, folder: Path) -> dict[str, float]:
        """Returns one row of the table: sizes, and medians in seconds. The first save in the background, which
        allocates host memory, is reported apart."""

        def build() -> Engine:
            engine = build_engine(self.engine_config, distributed)
            prepare(engine, model_of(parameters), OptimizerConfig(), _TOKENS)
            return engine

        engine, manager = build(), CheckpointManager(folder, keep_last=1)
        times: dict[str, list[float]] = {"stall": [], "background": [], "blocking": []}
        for step in range(0, 2 * self.repeats + 2, 2):
            train_step(engine)
            times["stall"].append(timed(manager.begin_save, step, engine, {}))
            times["background"].append(times["stall"][-1] + timed(manager.wait))
            train_step(engine)
            times["blocking"].append(timed(manager.save, step + 1, engine, {}))
        row = {name: statistics.median(values[name != "blocking" :]) for name, values in times.items()}
        row["first_stall"] = times["stall"][0]
        row |= measure_copies(engine, folder, self.repeats)
        row["parameters"] = sum(torch.Size(shape).numel() for shape in engine.shapes().values())
        row["bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        del engine  # the next one has room, and no moments yet
        engine, newest, reading = build(), manager.path(manager.steps()[-1]), []
        for _ in range(self.repeats):
            drop_from_cache(newest)
            reader = CheckpointManager(folder)
            reading.append((timed(reader.latest_valid), timed(reader.load, newest, engine)))
        row["verify"], row["load"] = map(statistics.median, zip(*reading, strict=True))
        barrier()
        if distributed.rank == 0:
            shutil.rmtree(folder)
        return row


def parse_size(text: str) -> int:
    """Reads 10M, 1.5B, 200000. Raises ValueError."""
    unit = {"k": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:], 1)
    try:
        size = int(float(text.rstrip("kMB")) * unit)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError(f"--sizes {text}: a positive number of parameters such as 30M is needed")
    return size


def model_of(parameters: int) -> ModelConfig:
    """Returns a language model of about so many parameters: 8 layers, as wide as that takes."""
    per_layer = 2 * 4 + 4  # an MLP of ratio 4 and attention, in squares of the width
    width = 64
    while _VOCABULARY * width + _LAYERS * per_layer * width**2 < parameters:
        width += 64
    return ModelConfig(vocab_size=_VOCABULARY, d_model=width, n_layers=_LAYERS, layers=("attention",))


def measure_copies(engine: Engine, folder: Path, repeats: int) -> dict[str, float]:
    """Returns medians in seconds of a copy in the node's memory: until training goes on, and until it is complete."""
    copies = LocalCopies(str(folder), folder / RECORD, CheckpointConfig(local_every=1))
    manager = CheckpointManager(folder, copies=copies)
    copies.follow(None)
    stalls, background = [], []
    for step in range(1, repeats + 2):
        train_step(engine)
        stalls.append(timed(manager.begin_copy, step, engine, {}))
        background.append(stalls[-1] + timed(manager.wait))
    if copies.off:
        raise ValueError("copies could not be made")
    copies.end()
    return {"copy_stall": statistics.median(stalls[1:]), "copy": statistics.median(background[1:])}


def train_step(engine: Engine) -> None:
    """Makes a step on a handful of tokens: the optimizer has moments from the first one on."""
    tokens = torch.arange(_TOKENS).view(1, _TOKENS) % _VOCABULARY
    borders = torch.tensor([0, _TOKENS], dtype=torch.int32)
    batch = Batch(tokens, tokens, borders, None, _TOKENS, None, _TOKENS).to(engine.device)
    engine.backward(CausalLM(ObjectiveConfig()).loss(engine.model, batch).total / _TOKENS, last=True)
    engine.step(1.0)


def timed(action: Callable[..., Any], *arguments: Any) -> float:
    """Returns the seconds until `action` has ended on every rank."""
    barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    action(*arguments)
    barrier()
    return time.perf_counter() - began


def drop_from_cache(directory: Path) -> None:
    """Lets the next reader fetch the files from the storage (where the system takes the advice)."""
    for path in directory.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(rows: list[dict[str, float]]) -> str:
    heads = {"stall": "stall", "first_stall": "first stall", "background": "in background", "blocking": "blocking"}
    heads |= {"verify": "verify", "load": "load", "copy_stall": "copy's stall", "copy": "copy"}
    lines = [["parameters", "size", "stall/blocking", *heads.values()]]
    for row in rows:
        sizes = f"{row['parameters'] / 1e6:.1f} M", f"{row['bytes'] / 1e9:.2f} GB"
        lines.append([*sizes, f"{row['stall'] / row['blocking']:.1%}", *(f"{row[name]:.3f} s" for name in heads)])
    return columns(lines, ())
