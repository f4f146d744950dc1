"""Speed and memory of the entries of a comparison, side by side.

What a run says of its own speed depends on what else the machine did meanwhile. So each entry takes a few training
steps in a fresh process, with all cores and on fixed tokens (no data loading), in rounds over the entries so that all
meet the same conditions; the median over the rounds counts. A process measures one entry:

    python -P -m matmix.train.comparison.speed CONFIG.toml
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from matmix.data.batch import Batch
from matmix.kernels.benchmarks.measure import environment, peak_memory
from matmix.train.benchmark_memory import random_batch
from matmix.train.comparison.config import Comparison, Entry
from matmix.train.comparison.runs import Tell, cores, process_environment
from matmix.train.config import RunConfig
from matmix.train.console import begin_process, guarded
from matmix.train.files import write_whole
from matmix.train.recipe import load_config, write_config

ROUNDS = 3
WARM_UP = 3
"""Steps that are not timed: caches fill, kernels compile."""
STEPS, SECONDS = 5, 1.0
"""Timed are at least so many steps, and as many as fit into this time."""


def measure(config: RunConfig) -> dict[str, Any]:
    """Tokens per second and peak bytes of this process's training steps of one micro-batch.

    Bytes: on CUDA all that torch had allocated at once; else by how much the resident set grew at its highest, from
    before the model was made; None where the system does not tell.
    """
    from matmix.train.distributed import choose_device

    device = choose_device(config.device, 0)
    times: list[float] = []
    if device.type == "cuda":
        times = timed_steps(config)
        peak: int | None = torch.cuda.max_memory_allocated(device)
    else:
        warm = torch.randn(64, 64, requires_grad=True)
        (warm @ warm).sum().backward()  # the threads and tables of the libraries are not the model's
        try:
            peak = peak_memory(lambda: times.extend(timed_steps(config)))
        except FileNotFoundError:  # no /proc: not Linux
            peak = None
            times = timed_steps(config)
    tokens = config.micro_batch(1) * config.data.seqlen
    return {"tokens_per_second": tokens / statistics.median(times), "peak_bytes": peak, "steps": len(times)}


def timed_steps(config: RunConfig) -> list[float]:
    """Seconds of each timed step: forward, backward and optimizer on one micro-batch."""
    from matmix.model import build_model, initialize
    from matmix.train.distributed import Distributed
    from matmix.train.engine import build_engine
    from matmix.train.objectives import compute_loss, count_targets
    from matmix.train.optimizer import make_optimizer

    with Distributed.from_environment(config.device) as distributed:
        engine = build_engine(config.engine, distributed)
        engine.prepare(
            build_model(config.model, device="meta"),
            initialize=functools.partial(initialize, seed=0),
            make_optimizer=functools.partial(make_optimizer, config=config.optimizer),
        )
        batch = fixed_batch(config).to(engine.device)
        targets = count_targets(batch)
        times: list[float] = []
        while len(times) < WARM_UP + STEPS or sum(times[WARM_UP:]) < SECONDS:
            began = time.perf_counter()
            loss = compute_loss(engine.model, batch, config.objective)
            engine.backward(loss.total / targets, last=True)
            engine.step(config.optimizer.max_grad_norm)
            del loss
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def fixed_batch(config: RunConfig) -> Batch:
    """A micro-batch of random tokens, the same for all entries, one document a row where documents are kept apart."""
    batch = random_batch(config, config.micro_batch(1))
    rows, length = batch.input_ids.shape
    if config.data.packing == "concat":
        batch.cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    elif config.data.packing == "document":
        batch.attention_mask = torch.ones(rows, length, dtype=torch.bool)
    return batch


def speed_path(home: Path) -> Path:
    return home / "speed.json"


def read_speed(home: Path) -> dict[str, Any]:
    """What `measure_all` wrote; {} where there is nothing."""
    try:
        return json.loads(speed_path(home).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def is_measured(comparison: Comparison) -> bool:
    """Whether speed.json has all the entries as they are now."""
    found = read_speed(comparison.home).get("entries", {})
    return all(found.get(entry.name, {}).get("of") == _facts(entry) for entry in comparison.entries)


def measure_all(comparison: Comparison, tell: Tell = print) -> None:
    """Measures all entries and writes speed.json. An entry whose process fails is told of and has no numbers."""
    found: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in comparison.entries}
    load = []
    for number in range(1, ROUNDS + 1):
        load.append(round(os.getloadavg()[0], 2))
        for entry in comparison.entries:
            if len(found[entry.name]) == number - 1:
                recipe = comparison.home / entry.folder / "speed.toml"
                recipe.parent.mkdir(parents=True, exist_ok=True)
                write_config(entry.config, recipe)
                result = _in_a_process(recipe)
                if isinstance(result, dict):
                    found[entry.name].append(result)
                else:
                    tell(f"speed of {entry.name}: not measured: {result}")
        tell(f"speed: round {number} of {ROUNDS} done")
    entries = {}
    for entry in comparison.entries:
        rounds = found[entry.name]
        entries[entry.name] = {"of": _facts(entry), "rounds": rounds}
        if len(rounds) == ROUNDS:
            speeds, peaks = ([one[key] for one in rounds] for key in ("tokens_per_second", "peak_bytes"))
            entries[entry.name] |= {
                "tokens_per_second": statistics.median(speeds),
                "peak_bytes": None if None in peaks else statistics.median(peaks),
            }
    on_gpu = comparison.entries[0].config.device != "cpu" and torch.cuda.is_available()
    record = {
        "environment": environment(comparison.entries[0].config.engine.precision) | {"threads": cores()},
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "memory": "torch.cuda.max_memory_allocated" if on_gpu else "peak resident set less that before the model",
        "load_before_each_round": load,
        "entries": entries,
    }
    write_whole(speed_path(comparison.home), json.dumps(record, indent=1) + "\n")


def _facts(entry: Entry) -> dict[str, Any]:
    """What a measurement belongs to."""
    config = entry.config
    return {
        "parameters": entry.parameters,
        "d_model": config.model.d_model,
        "layers": list(config.model.layers),
        "micro_batch_size": config.micro_batch(1),
        "seqlen": config.data.seqlen,
        "precision": config.engine.precision,
    }


def _in_a_process(recipe: Path) -> dict[str, Any] | str:
    """What `measure` found, or why it could not."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "matmix.train.comparison.speed", str(recipe)],
        env=process_environment(cores()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode or not lines:
        return lines[-1] if lines else f"exit code {done.returncode}"
    return json.loads(lines[-1])


def main(arguments: list[str] | None = None) -> int:
    """Measures the config of a file and prints the result as JSON."""
    (recipe,) = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        print(json.dumps(measure(load_config(recipe))))
        return 0

    return guarded(run)


if __name__ == "__main__":
    begin_process()
    sys.exit(main())
