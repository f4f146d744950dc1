"""Counts what a reporting interval did: loss sums, tokens, seconds, time spent waiting for data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import torch

from matmix.train.callbacks.base import StepRecord
from matmix.train.meters.collectives import CollectiveClock
from matmix.train.meters.stragglers import Times

# Dense bf16 peak of one device in FLOP/s, from the vendors' data sheets; devices not listed report no utilisation.
PEAK_FLOPS = {
    "A100": 312e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a CUDA device, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


class Speedometer:
    """Collects sums between records. Time spent in `paused` (evaluation, saving) is not counted."""

    def __init__(self, forward_flops_per_token: float, device: torch.device, world_size: int) -> None:
        self.flops_per_token = 3 * forward_flops_per_token  # a backward pass costs two forward passes
        self.device, self.world_size = device, world_size
        peak = peak_flops(device)
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
        """Around a step; sample: whether a record follows."""
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
        """Of the interval so far, per step: seconds, of which waiting for data, of which in collectives."""
        steps = max(self.begun, 1)
        return (time.perf_counter() - self.began) / steps, self.waited / steps, self.collectives.per_step()

    def record(
        self,
        *,
        step: int,
        tokens: int,
        skipped: int,
        damaged: int,
        rewinds: int,
        restores: int,
        grad_norm: float,
        lr: float,
        clip_norms: dict[str, float],
        monitored: dict[str, float],
        ranks: dict[str, float],
        goodput: dict[str, float],
    ) -> StepRecord:
        """The interval's record; a new interval begins."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        speed = self.tokens / seconds
        record = StepRecord(
            step=step,
            steps=self.steps,
            loss=self.loss / max(self.targets, 1),
            means={name: value / max(self.targets, 1) for name, value in self.sums.items()},
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_second=speed,
            seconds_per_step=seconds / max(self.steps, 1),
            data_wait=self.waited / seconds,
            memory=self._memory(),
            mfu=None if self.peak is None else speed * self.flops_per_token / self.peak,
            skipped=skipped,
            damaged=damaged,
            rewinds=rewinds,
            restores=restores,
            clip_norms=clip_norms,
            monitored=monitored,
            ranks=ranks,
            goodput=goodput,
        )
        self.start()
        return record

    def _memory(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return psutil.Process().memory_info().rss / 2**30
