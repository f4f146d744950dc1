"""Measures what the interval between two records did, the states of mixers in it, and where the run's time went."""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from matmix.data.storage.files import write_atomic
from matmix.train.engine.base import Engine
from matmix.train.meters.collectives import CollectiveClock, Times

Arithmetic = Literal["bf16", "tf32", "fp32"]
"""The number format of matrix products."""

CAUSES = ("useful", "data", "saves", "evaluation", "skipped", "restarts", "rewinds", "other")
"""useful: steps that count (with their waits for other ranks); data: waits for it; saves: what they keep training
waiting; skipped: steps that were not finite; restarts: starts, and what was lost since the checkpoint they go on from;
rewinds: the same for going back within a start; other: records, comparisons of copies."""


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
    """Returns what matrix products compute in at this `engine.precision`; fp32 uses tf32 only where torch is set so."""
    if precision == "bf16":
        return "bf16"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the dense FLOP/s of a CUDA device at this `engine.precision`, or None where that is not known."""
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
        """Returns all numbers of the record by their names in metrics.jsonl, without those that have no value."""
        values = dataclasses.asdict(self)
        unit = values.pop("unit")
        prefixes = {"clip_norms": "grad_norm", "monitored": "monitor", "ranks": "ranks", "goodput": "goodput"}
        groups = {prefix: values.pop(key) for key, prefix in prefixes.items()}
        means = values.pop("means")
        named = {re.sub("^tokens", unit, key): value for key, value in values.items() if value is not None}
        grouped = {f"{prefix}/{name}": value for prefix, group in groups.items() for name, value in group.items()}
        return named | means | grouped


class Speedometer:
    """Collects sums between records. Time spent in `paused` (evaluation, saving) is not counted."""

    def __init__(self, engine: Engine, forward_flops: float, unit: str) -> None:
        """forward_flops: of one token, or other `unit`."""
        self.flops, self.unit = 3 * forward_flops, unit  # a backward pass costs two forward passes
        self.device = engine.device
        peak = peak_flops(self.device, engine.config.precision)
        self.peak = None if peak is None else peak * engine.world_size
        self.collectives = CollectiveClock(self.device)
        self.start()

    def start(self) -> None:
        self.began = time.perf_counter()
        self.waited = self.loss = self.targets = self.tokens = 0.0
        self.sums: dict[str, float] = {}  # of what else the task records
        self.steps = 0
        self.begun = 0  # steps, also those that were skipped
        self.collectives.reset()

    @contextlib.contextmanager
    def stepping(self, *, sample: bool) -> Iterator[None]:
        """Measures the step inside; sample: a record follows it."""
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
        """Returns this rank's seconds per step of the interval so far."""
        steps = max(self.begun, 1)
        return Times((time.perf_counter() - self.began) / steps, self.waited / steps, self.collectives.per_step())

    def record(self, **others: Any) -> StepRecord:
        """Returns the interval's record and begins a new interval; others: the fields that are not measured here."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        speed = self.tokens / seconds
        cuda = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self.device) if cuda else psutil.Process().memory_info().rss
        record = StepRecord(
            **others,
            unit=self.unit,
            steps=self.steps,
            loss=self.loss / max(self.targets, 1) if self.steps else math.nan,
            means={name: value / max(self.targets, 1) for name, value in self.sums.items()},
            tokens_per_second=speed,
            seconds_per_step=seconds / max(self.steps or self.begun, 1),
            data_wait=self.waited / seconds,
            memory=memory / 2**30,
            mfu=None if self.peak is None else speed * self.flops / self.peak,
        )
        self.start()
        return record


class Monitor:
    """Collects the scalars that a model's mixers report of their forward passes (`model.monitor()`), over
    micro-batches, steps and ranks. Names that end in "_max" combine by maximum, others by mean; a NaN or infinity
    stays.

    Collecting costs three small operations on the device per micro-batch, however many layers there are, and never
    waits for it: values come to the host, and ranks exchange them, only for a record and after a step that failed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names: tuple[str, ...] = ()
        self.step: list[torch.Tensor] = []  # of the step's micro-batches, each (names,)
        self.start_interval()

    def start_interval(self) -> None:
        self.largest: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.count = 0

    def read(self) -> list[torch.Tensor]:
        """Returns the values of a forward pass, (names,), or nothing where there are none; called before its backward
        pass, which may run forward passes again."""
        values = self.engine.module.monitor()
        self.names = tuple(values)
        return [torch.stack(list(values.values())).detach()] if values else []

    def collect(self, step: list[torch.Tensor]) -> None:
        """Collects what was read in a step."""
        self.step = step
        for values in step:
            self.largest = values if self.largest is None else torch.maximum(self.largest, values)
            self.total = values.double() if self.total is None else self.total + values
        self.count += len(step)

    def of_step(self) -> dict[str, float]:
        """Returns the values of the step so far, by layer. Called on all ranks."""
        if not self.step:
            return {}
        stacked = torch.stack(self.step)
        return self._over_ranks(stacked.amax(0), stacked.double().mean(0))

    def of_interval(self) -> dict[str, float]:
        """Returns the values since the last call, by layer. Called on all ranks."""
        if not self.count:
            return {}
        values = self._over_ranks(self.largest, self.total / self.count)
        self.start_interval()
        return values

    def _over_ranks(self, largest: torch.Tensor, mean: torch.Tensor) -> dict[str, float]:
        # Gathered and not reduced: what a maximum makes of a NaN differs between communication libraries.
        gathered = self.engine.all_gather(torch.stack([largest.double(), mean]))
        largest_of_all, mean_of_all = gathered[:, 0].amax(0).tolist(), gathered[:, 1].mean(0).tolist()
        pairs = zip(self.names, largest_of_all, mean_of_all, strict=True)
        return {name: high if name.endswith("_max") else mean for name, high, mean in pairs}


class Goodput:
    """An account in which every second since the run's first start appears once, under one of `CAUSES`. It is part of
    the checkpoints and ends at a save. A start from a checkpoint books the time since then as restart: steps that are
    done again, time without a process, and the start itself."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.mark = time.monotonic()

    def begin(self, since: float) -> None:
        """Begins the account of a run without a checkpoint; since: when the run first started, seconds since 1970."""
        self.load_state_dict({"seconds": {}, "until": since}, "restarts")

    def spend(self, cause: str) -> None:
        """Books the time since the last call under this cause."""
        now = time.monotonic()
        self.seconds[cause] += now - self.mark
        self.mark = now

    def shares(self) -> dict[str, float]:
        """Returns the share of each cause in the time since the run's first start, and this time as "seconds"."""
        total = sum(self.seconds.values())
        return {"seconds": total, **{cause: spent / max(total, 1e-9) for cause, spent in self.seconds.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Returns the account for a checkpoint, JSON-serialisable."""
        return {"seconds": dict(self.seconds), "until": time.time()}

    def load_state_dict(self, state: dict[str, Any] | None, lost_to: str) -> None:
        """Goes on with the account of a checkpoint, if it holds one; lost_to: the cause of the time since its save."""
        state = state or {"seconds": {}, "until": time.time()}
        self.seconds = {cause: float(state["seconds"].get(cause, 0.0)) for cause in CAUSES}
        # Hosts' clocks may be apart; an account never shrinks.
        self.seconds[lost_to] += max(time.time() - state["until"], 0.0)
        self.mark = time.monotonic()


def first_start(run_dir: Path, *, write: bool) -> float:
    """Returns when the run was first started, in seconds since 1970, as RUN/launch/begun tells, else when this process
    was. write: makes that file. Storage that fails costs the file only."""
    path, mine = run_dir / "launch" / "begun", psutil.Process().create_time()
    with contextlib.suppress(OSError, ValueError):
        return min(float(path.read_text(encoding="ascii")), mine)
    if write:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, f"{mine:.3f}\n")
    return mine
