"""Speed and memory of the entries of a comparison, side by side: each takes a few training steps in a fresh process
(`python -P -m matmix.launch.lab.compare.speed CONFIG.toml`), with all cores and on fixed tokens, in rounds over the
entries so that all meet the same conditions; the median over the rounds counts."""

import contextlib
import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from matmix.data.loading.batch import Batch
from matmix.data.storage.files import write_atomic
from matmix.launch.lab.compare.config import Comparison, Entry
from matmix.launch.lab.measuring import environment, peak_memory, prepare, random_batch
from matmix.launch.many.runs import start, threads
from matmix.train.config import RunConfig
from matmix.train.engine.build import build_engine
from matmix.train.process import stop
from matmix.train.process.console import begin_process, guarded
from matmix.train.process.distributed import Distributed, choose_device
from matmix.train.recipe import config_to_dict, load_config, write_config
from matmix.train.tasks import unit_of

logger = logging.getLogger(__name__)

ROUNDS = 3
WARM_UP = 3
"""Steps that are not timed: caches fill, kernels compile."""
STEPS, SECONDS = 5, 1.0
"""Timed are at least so many steps, and as many as fit into this time."""
_LOOK_SECONDS = 0.2

Row = dict[str, Any]
"""What speed.json says of an entry."""


# -- the process of one entry -----------------------------------------------------------------------------------------


def measure(config: RunConfig, *, seconds: float = SECONDS) -> Row:
    """Tokens, or images, per second and peak bytes of this process's training steps of one micro-batch: on CUDA all
    that torch had allocated at once, else by how much the resident set grew since before the model; None = unknown."""
    device, peak = choose_device(config.device, 0), None
    times: list[float] = []
    if device.type == "cuda":
        times = timed_steps(config, seconds=seconds)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        warm = torch.randn(64, 64, requires_grad=True)
        (warm @ warm).sum().backward()  # the threads and tables of the libraries are not the model's
        try:
            peak = peak_memory(lambda: times.extend(timed_steps(config, seconds=seconds)))
        except FileNotFoundError:  # no /proc: not Linux
            times = timed_steps(config, seconds=seconds)
    tokens = config.micro_batch(1) * config.task().units(config.data.seqlen)
    return {"tokens_per_second": tokens / statistics.median(times), "peak_bytes": peak, "steps": len(times)}


def timed_steps(
    config: RunConfig, *, warm_up: int = WARM_UP, steps: int = STEPS, seconds: float = SECONDS
) -> list[float]:
    """Seconds of each timed step, forward, backward and optimizer on one micro-batch: at least `steps` of them, and as
    many as fit into `seconds`, after those that warm up."""
    with Distributed.from_environment(config.device) as distributed:
        engine = build_engine(config.engine, distributed)
        prepare(engine, config.model, config.optimizer, config.data.seqlen)
        batch = fixed_batch(config).to(engine.device)
        task = config.task()
        targets = task.count_targets(batch)
        times: list[float] = []
        while len(times) < warm_up + steps or sum(times[warm_up:]) < seconds:
            began = time.perf_counter()
            loss = task.loss(engine.model, batch)
            engine.backward(loss.total / targets, last=True)
            engine.step(config.optimizer.max_grad_norm)
            del loss
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            times.append(time.perf_counter() - began)
    return times[warm_up:]


def fixed_batch(config: RunConfig) -> Batch:
    """A micro-batch of random tokens, the same for all entries, one document a row where documents are kept apart."""
    batch = random_batch(config, config.micro_batch(1))
    rows, length = batch.inputs.shape[:2]
    if config.data.packing == "concat":
        batch.cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    elif config.data.packing == "document":
        batch.attention_mask = torch.ones(rows, length, dtype=torch.bool)
    return batch


def main() -> int:
    """Measures the config of a file and prints the result as JSON."""
    print(json.dumps(measure(load_config(sys.argv[1]))))
    return 0


# -- all entries ------------------------------------------------------------------------------------------------------


def speed_path(home: Path) -> Path:
    return home / "speed.json"


def read_speed(home: Path) -> dict[str, Row]:
    """Entry's name -> its row as `measure_all` wrote it; {} where there is nothing."""
    try:
        return dict(json.loads(speed_path(home).read_text(encoding="utf-8"))["entries"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def current_rows(comparison: Comparison) -> dict[str, Row]:
    """Entry's name -> its row, of the entries that were measured as they are now."""
    rows = read_speed(comparison.home)
    names = (one.name for one in comparison.entries if rows.get(one.name, {}).get("fingerprint") == fingerprint(one))
    return {name: rows[name] for name in names}


def fingerprint(entry: Entry) -> str:
    """Changes with whatever the speed of an entry's training step depends on."""
    values = config_to_dict(entry.config)
    parts = [values["model"], values["engine"], values["device"], entry.config.micro_batch(1)]
    parts += [values["data"]["seqlen"], values["data"]["packing"]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def is_measured(comparison: Comparison) -> bool:
    """Returns True where speed.json has all the entries as they are now, with variants those of the first."""
    first = comparison.by_variant()[0]
    return len(current_rows(first)) == len(first.entries)


def measure_all(comparison: Comparison) -> bool:
    """Measures all entries, with variants those of the first, and writes speed.json, beside rows of entries that the
    recipe no longer has. One whose process fails has no numbers. False, and no file, where a signal came."""
    comparison = comparison.by_variant()[0]
    rounds: dict[str, list[Row]] = {entry.name: [] for entry in comparison.entries}
    load = []
    for number in range(1, ROUNDS + 1):
        load.append(round(os.getloadavg()[0], 2))
        for entry in comparison.entries:
            if len(rounds[entry.name]) < number - 1:
                continue  # it has failed before
            recipe = comparison.home / entry.folder / "speed.toml"
            recipe.parent.mkdir(parents=True, exist_ok=True)
            write_config(entry.config, recipe)
            result = in_a_process(recipe)
            if stop.received():
                logger.info("speed: stopped, nothing is written")
                return False
            if isinstance(result, dict):
                rounds[entry.name].append(result)
            else:
                logger.info(f"speed of {entry.name}: not measured: {result}")
        logger.info(f"speed: round {number} of {ROUNDS} done")
    rows, on = read_speed(comparison.home), _machine(comparison.entries[0].config) | {"load_before_each_round": load}
    for entry in comparison.entries:
        its = rounds[entry.name]
        row = {"fingerprint": fingerprint(entry), "of": _facts(entry), "on": on, "rounds": its}
        for key in ("tokens_per_second", "peak_bytes") if len(its) == ROUNDS else ():
            values = [one[key] for one in its]
            row[key] = None if None in values else statistics.median(values)
        rows[entry.name] = row
    write_atomic(speed_path(comparison.home), json.dumps({"entries": rows}, indent=1) + "\n")
    return True


def in_a_process(recipe: Path) -> Row | str:
    """Returns what `measure` found, or why it could not."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    output, errors = None, ""
    with start("matmix.launch.lab.compare.speed", recipe, **pipes) as process:
        try:
            while output is None and not stop.received():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, errors = process.communicate(timeout=_LOOK_SECONDS)
        finally:
            process.kill()  # nothing where it has ended
    lines = ((output or "") if process.returncode == 0 else errors).strip().splitlines()
    if process.returncode or not lines:
        return lines[-1] if lines else f"exit code {process.returncode}"
    return json.loads(lines[-1])


def _facts(entry: Entry) -> Row:
    """Tells the reader of the file what a measurement belongs to."""
    config = entry.config
    row = {"parameters": entry.parameters, "d_model": config.model.d_model, "layers": list(config.model.layers)}
    row |= {"micro_batch_size": config.micro_batch(1), "seqlen": config.data.seqlen}
    return row | {"precision": config.engine.precision}


def _machine(config: RunConfig) -> Row:
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    return {
        "environment": environment(config.engine.precision) | {"threads": threads()},
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "memory": "torch.cuda.max_memory_allocated" if on_gpu else "peak resident set less that before the model",
    }


def speed_words(comparison: Comparison) -> list[str]:
    """Where, when and how the speeds of a table were measured, in sentences."""
    rows, unit = current_rows(comparison), unit_of(comparison.entries[0].config.objective.name)
    sessions: dict[str, list[str]] = {}
    for name, row in rows.items():
        sessions.setdefault(_session_words(row, unit), []).append(name)
    lines = [
        f"Speed: {words}" if len(sessions) == 1 else f"Speed of {', '.join(names)}: {words}"
        for words, names in sessions.items()
    ]
    if missing := [entry.name for entry in comparison.entries if entry.name not in rows]:
        whose = f" of {', '.join(missing)}" if rows else ""
        lines.append(f"Speed and memory{whose} were not measured as configured here (matmix compare RECIPE --speed).")
    return lines


def _session_words(row: Row, unit: str) -> str:
    micro, on = row["of"]["micro_batch_size"], row["on"]
    batch = f"{micro} x {row['of']['seqlen']} tokens" if unit == "tokens" else f"{micro} {unit}"
    where = on["environment"]
    machine = on["device"] if on["device"] != "CPU" else f"{where['processor']}, {where['threads']} threads"
    load = on["load_before_each_round"][0]  # before later rounds it holds the measurement itself
    busy = f", load of the machine before the rounds {load:.1f}" if load > 1 else ""
    measured = f"training steps of {batch} side by side, median of {ROUNDS} rounds; {machine}"
    return f"{measured}, torch {where['torch']}, {where['dtype']}, {where['date'][:10]}{busy}. Memory: {on['memory']}."


if __name__ == "__main__":
    begin_process()
    sys.exit(guarded(main))
