"""Counts what a reporting interval did: loss sums, tokens or images, seconds, time spent waiting for data."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any, Literal

import psutil
import torch

from matmix.train.meters.collectives import CollectiveClock
from matmix.train.meters.stragglers import Times

Arithmetic = Literal["bf16", "tf32", "fp32"]
"""What matrix products compute in."""


def _peaks(bf16: float, tf32: float, fp32: float) -> dict[Arithmetic, float]:
    return {"bf16": bf16 * 1e12, "tf32": tf32 * 1e12, "fp32": fp32 * 1e12}


# Dense peaks of one device in FLOP/s, from the vendors' data sheets; devices not listed report no utilisation.
PEAK_FLOPS = {
    "A100": _peaks(312, 156, 19.5),
    "A40": _peaks(149.7, 74.8, 37.4),
    "L40S": _peaks(362, 183, 91.6),
    "L40": _peaks(181, 90.5, 90.5),
    "H100 PCIe": _peaks(756, 378, 51),
    "H100 NVL": _peaks(835, 417.5, 60),
    "H100": _peaks(989, 494.5, 67),
    "H200": _peaks(989, 494.5, 67),
    "B200": _peaks(2250, 1100, 75),
    "MI300X": _peaks(1307, 653.7, 163.4),
}


def arithmetic(precision: str) -> Arithmetic:
    """What matrix products compute in where `engine.precision` is this: float32 ones in tf32 where torch is set so in
    this process (`torch.set_float32_matmul_precision`, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1), which it is not by
    itself."""
    if precision == "bf16":
        return "bf16"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense FLOP/s of a CUDA device in what a run of this `engine.precision` computes in, or None where that is not
    known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks[arithmetic(precision)] for key, peaks in PEAK_FLOPS.items() if key in name), None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One reporting interval: `steps` optimizer steps that end at `step`. Losses are means over all ranks' targets."""

    step: int
    steps: int
    loss: float  # nats per target; NaN where every step of the interval was skipped
    means: dict[str, float]  # over the same targets, of what else the task records, such as "accuracy"
    grad_norm: float  # of the last step, before clipping
    lr: float
    tokens: int  # seen since the start of the run, padding not counted; or what else `unit` says
    tokens_per_second: float  # over all ranks
    seconds_per_step: float
    data_wait: float  # share of the time spent waiting for data
    memory: float  # peak GiB of this rank: device memory on CUDA, resident memory on CPU
    mfu: float | None  # share of the device's peak FLOP/s in the run's precision, where that is known
    skipped: int  # steps skipped since the start for a NaN or infinite gradient
    damaged: int  # sequences left out since the start for a damaged shard (data.skip_damaged)
    rewinds: int  # times that the run went back over a loss spike since the start
    restores: int  # times that the run went back because copies of the model differed
    clip_norms: dict[str, float]  # of the last step, before clipping, by clipping group, where there are several
    monitored: dict[str, float]  # what the mixers say of the interval's forward passes, such as state norms by layer
    ranks: dict[str, float]  # seconds a step by rank: `stragglers.numbers`; empty in a single process
    goodput: dict[str, float]  # shares of the time since the first start: `goodput.CAUSES`
    unit: str = "tokens"  # what is counted: `Task.unit`

    def numbers(self) -> dict[str, float]:
        """All numbers of the record that have a value: `means` by their own names, counters by the name of what they
        count, norms of clipping groups under
        "grad_norm/<group>", the scalars of mixers under "monitor/blocks.<i>.<name>", others under "ranks/" and
        "goodput/"."""
        numbers: dict[str, float] = {}
        values = dataclasses.asdict(self)
        unit = values.pop("unit")
        for key, value in values.items():
            if key.startswith("tokens"):
                key = unit + key.removeprefix("tokens")
            numbers |= value if key == "means" else {} if value is None else {key: value}
        prefixes = {"clip_norms": "grad_norm", "monitored": "monitor", "ranks": "ranks", "goodput": "goodput"}
        for key, prefix in prefixes.items():
            numbers |= {f"{prefix}/{name}": value for name, value in numbers.pop(key).items()}
        return numbers


class Speedometer:
    """Collects sums between records. Time spent in `paused` (evaluation, saving) is not counted."""

    def __init__(
        self, forward_flops: float, device: torch.device, world_size: int, precision: str, unit: str = "tokens"
    ) -> None:
        """forward_flops: of one token, or of what else `unit` says is counted; precision: that of the engine."""
        self.flops, self.unit = 3 * forward_flops, unit  # a backward pass costs two forward passes
        self.device, self.world_size = device, world_size
        peak = peak_flops(device, precision)
        self.peak = None if peak is None else peak * world_size
        self.collectives = CollectiveClock(device)
        self.start()

    def start(self) -> None:
        self.began = time.perf_counter()
        self.waited = 0.0
        self.loss = self.targets = self.tokens = 0.0
        self.sums: dict[str, float] = {}  # of what else the task records
        self.steps = 0
        self.begun = 0  # steps, also those that were skipped
        self.collectives.reset()

    @contextlib.contextmanager
    def stepping(self, *, sample: bool) -> Iterator[None]:
        """Context around a step; sample: whether a record follows."""
        self.begun += 1
        with self.collectives.measure(sample=sample):
            yield

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def count(self, loss: float, sums: dict[str, float], targets: float, tokens: float) -> None:
        self.loss += loss
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in sums.items()}
        self.targets += targets
        self.tokens += tokens
        self.steps += 1

    def own_times(self) -> Times:
        """Seconds per step of the interval so far: in all, waiting for data, and in collectives."""
        steps = max(self.begun, 1)
        return (time.perf_counter() - self.began) / steps, self.waited / steps, self.collectives.per_step()

    def record(self, **others: Any) -> StepRecord:
        """The interval's record; a new interval begins. others: the fields of the record that are not measured here."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        speed = self.tokens / seconds
        record = StepRecord(
            **others,
            unit=self.unit,
            steps=self.steps,
            loss=self.loss / max(self.targets, 1) if self.steps else math.nan,
            means={name: value / max(self.targets, 1) for name, value in self.sums.items()},
            tokens_per_second=speed,
            seconds_per_step=seconds / max(self.steps or self.begun, 1),
            data_wait=self.waited / seconds,
            memory=self._memory(),
            mfu=None if self.peak is None else speed * self.flops / self.peak,
        )
        self.start()
        return record

    def _memory(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return psutil.Process().memory_info().rss / 2**30
