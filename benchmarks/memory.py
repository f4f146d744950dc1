"""`memory`: what `matmix plan` says of memory, beside what a process really takes."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from matmix.benchmarks.report import columns
from matmix.launch.lab.measuring import prepare, process_bytes, random_batch
from matmix.train.arguments import Recipe
from matmix.train.config import RunConfig
from matmix.train.engine.build import build_engine
from matmix.train.estimate import FLOAT
from matmix.train.estimate.plan import make_plan, part_of_rows
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config

_CHECKPOINTING = "--engine.activation-checkpointing"
MODES: dict[str, tuple[str, ...]] = {
    "none": (_CHECKPOINTING, "none"),
    "selective": (_CHECKPOINTING, "selective"),
    "selective by op": (_CHECKPOINTING, "selective", "--engine.selective-by", "op"),
    "full": (_CHECKPOINTING, "full"),
    "offload": (_CHECKPOINTING, "offload"),
}
ENGINES: dict[str, tuple[str, ...]] = {
    "fsdp2": ("--engine.name", "fsdp2"),
    "ddp": ("--engine.name", "ddp"),
    **{f"zero{n}": ("--engine.name", "deepspeed", "--engine.zero-stage", str(n)) for n in (1, 2, 3)},
}
ENGINES |= {f"zero{n}, offload": (*ENGINES[f"zero{n}"], "--engine.offload", "True") for n in (1, 2, 3)}
_IMPORTED_LATE = ("torch._dynamo", "torch.distributed.tensor")
"""What torch imports once a model is prepared or recomputed: some 100 MB that are not the model's."""


class Comparison(NamedTuple):
    """One case, bytes of the rank that took most."""

    title: str
    planned: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What `matmix plan` says of memory, beside what a process really takes.

    Each case is a process (or one per rank) of its own that makes the engine, runs two optimizer steps on random tokens
    and reads its peak of resident memory from the kernel, less what it held before the model. CPU only: there every
    byte can be seen. glibc is told to return freed blocks at once, since kept ones would count as used.
    """

    recipe: Recipe = ""
    ranks: int = 2
    """Processes of the cases with several."""
    peak: bool = False
    """Measure this process alone, as the command itself starts others."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        if self.peak:
            print(json.dumps({"peak": peak_of(load_config(self.recipe, rest))}))
            return 0
        cases = {f"1 rank, checkpointing {name}": (flags, 1) for name, flags in MODES.items()}
        cases |= {f"{self.ranks} ranks, {name}": (flags, self.ranks) for name, flags in ENGINES.items()}
        rows = [["case", "planned MiB", "measured MiB", "ratio"]]
        for title, (flags, ranks) in cases.items():
            case = compare(title, [self.recipe, *rest, *flags], ranks)
            sizes = (f"{size / 2**20:,.0f}" for size in case[1:])
            rows.append([title, *sizes, f"{case.planned / case.measured:.2f}"])
            print(f"{title}: done", file=sys.stderr)
        print(columns(rows))
        return 0


def compare(title: str, arguments: list[str], ranks: int = 1) -> Comparison:
    """Returns what is planned for a recipe with overrides, and what its largest rank takes."""
    config = load_config(arguments[0], arguments[1:])
    plan = make_plan(config, ranks)
    # On a CPU memory that is reserved and never written takes nothing; ZeRO 3 writes its gradients into the buffer.
    written = FLOAT * plan.parameters if config.engine.zero_stage == 3 else 0
    unwritten = max(0.0, plan.parts["buffers"] - written)
    planned = plan.total_bytes + sum(plan.on_host.values()) - unwritten  # here a device's memory is the host's
    return Comparison(title, planned, measure(arguments, ranks))


def measure(arguments: list[str], ranks: int = 1) -> int:
    """Returns the peak bytes of the largest rank for a recipe with overrides, in new processes. Raises RuntimeError
    where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "matmix.benchmarks", "memory", "--peak", *arguments]
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in map(str, range(ranks))
    ]  # fmt: skip
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"measuring {' '.join(arguments)} failed: {errors.strip().splitlines()[-1:]}")
    return max(json.loads(output.splitlines()[-1])["peak"] for output, _ in outputs)


def peak_of(config: RunConfig) -> int:
    """Returns the bytes of resident memory that two steps of `config` add to this process at their peak.

    Runs in a process of its own, on Linux, with model.vocab_size set.
    """
    with Distributed.from_environment("cpu") as distributed:
        engine, task = build_engine(config.engine, distributed), config.task()
        warm = torch.randn(64, 64, requires_grad=True)
        (warm @ warm).sum().backward()  # the threads and tables of the libraries are not the model's
        for name in _IMPORTED_LATE:
            importlib.import_module(name)
        batch = random_batch(part_of_rows(config), config.micro_batch(engine.mesh.data_size))
        before = process_bytes("VmRSS")
        prepare(engine, config.model, config.optimizer, config.data.seqlen)
        accumulation = config.global_batch_size // (len(batch.inputs) * engine.mesh.data_size)
        for _ in range(2):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: making the model is no step
            for number in range(accumulation):
                loss = task.loss(engine.model, batch)
                engine.backward(loss.total / task.count_targets(batch), last=number == accumulation - 1)
                del loss
            engine.step(1.0)
        return process_bytes("VmHWM") - before
