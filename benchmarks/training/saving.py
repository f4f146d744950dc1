"""What a checkpoint costs against the size of the model: the stall of training, the save, and reading it again.

    python -P -m matmix.benchmarks saving --sizes 10M,30M,100M --directory runs

Saves in the background and blocking saves take turns, so that whatever else the machine does hits both alike; medians
are reported. The checkpoint is dropped from the page cache before it is read: a resume reads it twice, for its
checksums and to load it, and finds it in the cache the second time. Under torchrun it measures all ranks together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from matmix.data.loading.batch import Batch
from matmix.launch.lab.measuring import prepare
from matmix.model import ModelConfig
from matmix.train.checkpoint.local_copies import RECORD, LocalCopies
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.config import ObjectiveConfig
from matmix.train.engine import Engine, EngineConfig, build_engine
from matmix.train.optim.config import OptimizerConfig
from matmix.train.process.distributed import Distributed, barrier, from_rank_zero
from matmix.train.tasks.token_prediction import CausalLM

_VOCABULARY, _LAYERS, _TOKENS = 8192, 8, 16
_TASK = CausalLM(ObjectiveConfig())


def model_of(parameters: int) -> ModelConfig:
    """A language model of about so many parameters: 8 layers, as wide as that takes."""
    per_layer = 2 * 4 + 4  # an MLP of ratio 4 and attention, in squares of the width
    width = 64
    while _VOCABULARY * width + _LAYERS * per_layer * width**2 < parameters:
        width += 64
    return ModelConfig(vocab_size=_VOCABULARY, d_model=width, n_layers=_LAYERS, layers=("attention",))


def build(config: EngineConfig, distributed: Distributed, model: ModelConfig) -> Engine:
    """The model in its engine, ready to be trained."""
    engine = build_engine(config, distributed)
    prepare(engine, model, OptimizerConfig(), _TOKENS)
    return engine


def train_step(engine: Engine) -> None:
    """A step on a handful of tokens: the optimizer has moments from the first one on."""
    tokens = torch.arange(_TOKENS).view(1, _TOKENS) % _VOCABULARY
    borders = torch.tensor([0, _TOKENS], dtype=torch.int32)
    batch = Batch(tokens, tokens, borders, None, _TOKENS, None, _TOKENS).to(engine.device)
    engine.backward(_TASK.loss(engine.model, batch).total / _TOKENS, last=True)
    engine.step(1.0)


def timed(action: Callable[..., Any], *arguments: Any) -> float:
    """Seconds until `action` has ended on every rank."""
    barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    action(*arguments)
    barrier()
    return time.perf_counter() - began


def measure_saves(engine: Engine, manager: CheckpointManager, repeats: int) -> dict[str, float]:
    """Medians in seconds. The first save in the background, which allocates host memory, is reported apart."""
    stalls, background, blocking = [], [], []
    for step in range(0, 2 * repeats + 2, 2):
        train_step(engine)
        stalls.append(timed(manager.begin_save, step, engine, {}))
        background.append(stalls[-1] + timed(manager.wait))
        train_step(engine)
        blocking.append(timed(manager.save, step + 1, engine, {}))
    return {
        "stall": statistics.median(stalls[1:]),
        "first_stall": stalls[0],
        "background": statistics.median(background[1:]),
        "blocking": statistics.median(blocking[1:]),
    }


def measure_copies(engine: Engine, folder: Path, repeats: int) -> dict[str, float]:
    """Medians in seconds of a copy in the node's memory: until training goes on, and until the copy is complete."""
    copies = LocalCopies(str(folder), folder / RECORD, every=1)
    manager = CheckpointManager(folder, copies=copies)
    manager.begin_anew()
    stalls, background = [], []
    for step in range(1, repeats + 2):
        train_step(engine)
        stalls.append(timed(manager.begin_copy, step, engine, {}))
        background.append(stalls[-1] + timed(manager.wait))
    if copies.off:
        raise ValueError("copies could not be made")
    manager.end_copies()
    return {"copy_stall": statistics.median(stalls[1:]), "copy": statistics.median(background[1:])}


def measure_resume(engine: Engine, manager: CheckpointManager, repeats: int) -> dict[str, float]:
    """Medians in seconds of checking the newest checkpoint, and of loading it."""
    newest = manager.path(manager.steps()[-1])
    verifying, loading = [], []
    for _ in range(repeats):
        drop_from_cache(newest)
        reader = CheckpointManager(manager.directory)
        verifying.append(timed(reader.latest_valid))
        loading.append(timed(reader.load, newest, engine))
    return {"verify": statistics.median(verifying), "load": statistics.median(loading)}


def measure(config: EngineConfig, distributed: Distributed, parameters: int, folder: Path, repeats: int) -> dict:
    """One row of the table: sizes, and seconds."""
    model = model_of(parameters)
    engine = build(config, distributed, model)
    manager = CheckpointManager(folder / f"{parameters}", keep_last=1)
    count = sum(torch.Size(shape).numel() for shape in engine.shapes().values())
    seconds = measure_saves(engine, manager, repeats)
    seconds |= measure_copies(engine, manager.directory, repeats)
    size = sum(path.stat().st_size for path in manager.directory.rglob("*") if path.is_file())
    del engine  # the next one has room, and no moments yet
    seconds |= measure_resume(build(config, distributed, model), manager, repeats)
    barrier()
    if distributed.rank == 0:
        shutil.rmtree(manager.directory)
    return {"parameters": count, "bytes": size, **seconds}


def drop_from_cache(directory: Path) -> None:
    """Lets the next reader fetch the files from the storage (where the system takes the advice)."""
    for path in directory.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(rows: list[dict]) -> str:
    """Rows of `measure`, as text."""
    heads = ("parameters", "size", "stall", "first stall", "in background", "blocking", "stall/blocking")
    lines = ["  ".join(f"{head:>14}" for head in (*heads, "verify", "load", "copy's stall", "copy"))]
    for row in rows:
        times = [f"{row[name]:.3f} s" for name in ("stall", "first_stall", "background", "blocking")]
        share, reading = (
            f"{row['stall'] / row['blocking']:.1%}",
            [f"{row[name]:.3f} s" for name in ("verify", "load", "copy_stall", "copy")],
        )
        cells = [f"{row['parameters'] / 1e6:.1f} M", f"{row['bytes'] / 1e9:.2f} GB", *times, share, *reading]
        lines.append("  ".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def parse_size(text: str) -> int:
    """10M, 1.5B, 200000 -> a number. Raises ValueError."""
    unit = {"k": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:], 1)
    try:
        size = int(float(text.rstrip("kMB")) * unit)
    except ValueError:
        raise ValueError(f"--sizes {text}: a number of parameters such as 30M is needed") from None
    if size < 1:
        raise ValueError(f"--sizes {text}: must be positive")
    return size


def main(arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -P -m matmix.benchmarks saving", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10M,30M,100M", help="numbers of parameters (default: 10M,30M,100M)")
    parser.add_argument("--repeats", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument("--engine", default="fsdp2", choices=["fsdp2", "ddp", "deepspeed"])
    parser.add_argument("--zero-stage", type=int, default=2, choices=range(4))
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--directory", type=Path, default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    options = parser.parse_args(arguments)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats}: must be 1 or more")
    config = EngineConfig(name=options.engine, zero_stage=options.zero_stage)
    with Distributed.from_environment(options.device) as distributed:
        made = tempfile.mkdtemp(dir=options.directory) if distributed.rank == 0 else ""
        folder = Path(from_rank_zero(made))
        try:
            rows = [measure(config, distributed, size, folder, options.repeats) for size in sizes]
        finally:
            if distributed.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    if distributed.rank == 0:
        print(table(rows))
        if options.json:
            device = torch.cuda.get_device_name() if distributed.device.type == "cuda" else platform.machine()
            where = {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads()}
            engine = {"ranks": distributed.world_size, "engine": dataclasses.asdict(config)}
            record = {
                "date": date.today().isoformat(),
                **where,
                **engine,
                "repeats": options.repeats,
                "sizes": rows,
            }
            options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
