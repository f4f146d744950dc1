"""What `matmix plan` says of memory, beside what a process really takes.

    python -P -m matmix.benchmarks memory

Each case is a process (or one per rank) of its own that makes the engine, runs two optimizer steps on random tokens and
reads its peak of resident memory from the kernel, less what it held before the model. CPU only: there every byte can be
seen. glibc is told to return freed blocks at once, since kept ones would count as used.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from matmix.launch.lab.measuring import prepare, process_bytes, random_batch
from matmix.train.config import RunConfig
from matmix.train.engine import build_engine
from matmix.train.estimate import FLOAT
from matmix.train.estimate.plan import make_plan
from matmix.train.process.console import begin_process
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config

MODES: dict[str, tuple[str, ...]] = {
    "none": ("--engine.activation-checkpointing", "none"),
    "selective": ("--engine.activation-checkpointing", "selective"),
    "selective by op": ("--engine.activation-checkpointing", "selective", "--engine.selective-by", "op"),
    "full": ("--engine.activation-checkpointing", "full"),
}
ENGINES: dict[str, tuple[str, ...]] = {
    "fsdp2": ("--engine.name", "fsdp2"),
    "ddp": ("--engine.name", "ddp"),
    "zero1": ("--engine.name", "deepspeed", "--engine.zero-stage", "1"),
    "zero2": ("--engine.name", "deepspeed", "--engine.zero-stage", "2"),
    "zero3": ("--engine.name", "deepspeed", "--engine.zero-stage", "3"),
}


_IMPORTED_LATE = ("torch._dynamo", "torch.distributed.tensor")
"""What torch imports once a model is prepared or recomputed: some 100 MB that are not the model's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One case, bytes of the rank that took most."""

    title: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.planned / self.measured


def peak_of(config: RunConfig) -> int:
    """Bytes of resident memory that two steps of `config` add to this process at their peak, on random tokens.

    Runs in a process of its own, on Linux, with model.vocab_size set.
    """
    with Distributed.from_environment("cpu") as distributed:
        return _peak_of_steps(config, distributed)


def _peak_of_steps(config: RunConfig, distributed: Distributed) -> int:
    engine, task = build_engine(config.engine, distributed), config.task()
    warm = torch.randn(64, 64, requires_grad=True)
    (warm @ warm).sum().backward()  # the threads and tables of the libraries are not the model's
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    batch = random_batch(config, config.micro_batch(engine.mesh.data_size))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = process_bytes("VmRSS")
    prepare(engine, config.model, config.optimizer, config.data.seqlen)
    accumulation = config.global_batch_size // (len(batch.inputs) * engine.mesh.data_size)
    for step in range(2):
        if step == 1:
            Path("/proc/self/clear_refs").write_text("5")  # the making of the model is not a step
        for number in range(accumulation):
            loss = task.loss(engine.model, batch)
            engine.backward(loss.total / task.count_targets(batch), last=number == accumulation - 1)
            del loss
        engine.step(1.0)
    return process_bytes("VmHWM") - before


def measure(arguments: list[str], ranks: int = 1) -> int:
    """Peak bytes of the largest rank for a recipe with overrides, in new processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, "-P", "-m", "matmix.benchmarks", "memory", "--peak", *arguments]
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"measuring {' '.join(arguments)} failed: {errors.strip().splitlines()[-1:]}")
    return max(json.loads(output.splitlines()[-1])["peak"] for output, _ in outputs)


def compare(title: str, arguments: list[str], ranks: int = 1) -> Comparison:
    """What is planned for a recipe with overrides, and what its largest rank takes."""
    config = load_config(arguments[0], arguments[1:])
    plan = make_plan(config, ranks)
    # On a CPU memory that is reserved and never written takes nothing; ZeRO 3 writes its gradients into the buffer.
    written = FLOAT * plan.parameters if config.engine.zero_stage == 3 else 0
    unwritten = max(0.0, plan.buffer_bytes - written)
    return Comparison(title, plan.total_bytes - unwritten, measure(arguments, ranks))


def main(arguments: list[str]) -> int:
    """The command."""
    begin_process()
    if arguments[:1] == ["--peak"]:
        config = load_config(arguments[1], arguments[2:])
        print(json.dumps({"peak": peak_of(config)}))
        return 0
    parser = argparse.ArgumentParser(prog="python -P -m matmix.benchmarks memory", description=__doc__)
    parser.add_argument("recipe", nargs="?", default="mru_shakespeare", help="recipe (default: mru_shakespeare)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the cases with several (default: 2)")
    options, overrides = parser.parse_known_args(arguments)
    cases = {f"1 rank, checkpointing {name}": ([*overrides, *flags], 1) for name, flags in MODES.items()}
    for name, flags in ENGINES.items():
        cases[f"{options.ranks} ranks, {name}"] = [*overrides, *flags], options.ranks
    print(f"{'case':<36}{'planned':>10}{'measured':>10}  MiB a rank", flush=True)
    for title, (flags, ranks) in cases.items():
        found = compare(title, [options.recipe, *flags], ranks)
        mebibytes = f"{found.planned / 2**20:>10.0f}{found.measured / 2**20:>10.0f}"
        print(f"{title:<36}{mebibytes}  ratio {found.ratio:.2f}", flush=True)
    return 0
