"""Measures the candidates of one case against each other: first whether they agree, then how long they take."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench, do_bench_cudagraph

from matmix.benchmarks import report
from matmix.benchmarks.peers import Missing, Op

PASSES = ("forward", "backward", "both")
LEAST_ROUNDS = 5
SMALL_BATCH, SMALL_SEQLEN, SMALL_REPETITIONS = 16, 128, 50
"""The case in which launches one by one are compared with a CUDA graph, and how often each runs."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Options that all speed commands take, and how such a command runs."""

    linear: ClassVar[bool] = False
    """Whether ours should cost the same per token at all lengths, so that it is shown whether it does."""
    with_small: ClassVar[bool] = False
    """Whether CUDA graphs are compared as well, on a small case."""
    device: str = "cuda"
    """cuda, cuda:1 ... or cpu."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of what the candidates are given."""
    tokens: int = 65536
    """Tokens of a case: tokens / length sequences, at least one."""
    lengths: str = ",".join(str(1 << power) for power in range(7, 18))
    """Sequence lengths, L,L,..."""
    d_model: int = 768
    """Model width, a multiple of 64."""
    rounds: int = 30
    """How often the candidates take turns."""
    budget: float = 3.0
    """Seconds for each candidate of a case, after 5 rounds."""
    only: str = ""
    """Peers whose name contains one of these texts, TEXT,..."""
    compile: bool = True
    """Leave out what torch.compile makes."""
    out: Path | None = None
    """JSON; default: results/COMMAND-DEVICE.json of the benchmarks."""
    plot: Path | None = None
    """Picture, PNG, SVG or PDF; default: beside the JSON, as PNG."""
    no_plot: bool = False
    """Draw nothing."""

    def check(self) -> None:
        if not re.fullmatch(r"\d+(,\d+)*", self.lengths):
            raise ValueError(f"--lengths {self.lengths}: give whole numbers, such as 128,512")
        for name, value in (("tokens", self.tokens), ("rounds", self.rounds), ("lengths", min(self.seqlens))):
            if value < 1:
                raise ValueError(f"--{name} {value}: must be 1 or more")
        if self.d_model < 64 or self.d_model % 64:
            raise ValueError(f"--d-model {self.d_model}: must be a multiple of 64, the width of a head")

    @property
    def seqlens(self) -> list[int]:
        return [int(part) for part in self.lengths.split(",")]

    @property
    def like(self) -> dict[str, Any]:
        return {"device": device_of(self.device), "dtype": getattr(torch, self.dtype)}

    def batch(self, seqlen: int) -> int:
        return max(1, self.tokens // seqlen)

    def wanted(self, name: str) -> bool:
        """Returns whether a candidate is measured; ours always is."""
        if name.endswith("compiled") and not self.compile:
            return False
        return name == "ours" or not self.only or any(text and text in name for text in self.only.split(","))

    def case(self, seqlen: int) -> Case:
        raise NotImplementedError

    def cases(self) -> Iterator[Case]:
        """Yields one case after the other, so that the tensors of one live no longer than it."""
        return map(self.case, self.seqlens)

    def case_of(self, seqlen: int, candidates: list[Candidate], kind: str = "", label: str = "") -> Case:
        """Returns a case of as many sequences as the tokens make."""
        label = label or f"length {seqlen:,}, batch {self.batch(seqlen):,}"
        return Case(label, kind, seqlen, self.batch(seqlen), self.dtype, candidates)

    def run(self, rest: list[str], typed: list[str]) -> int:
        """Measures, prints, writes and draws; returns the exit code."""
        self.check()
        device = device_of(self.device)
        clock = Clock(device)
        record: dict[str, Any] = {
            "command": re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower(),
            "environment": report.environment_of(device, self.dtype or "each case in its own dtype"),
            "tokens": self.tokens,
            "d_model": self.d_model,
            "copy_bandwidth": copy_bandwidth(clock),
            "cases": [],
        }
        print(report.opening(record), flush=True)
        for case in self.cases():
            record["cases"].append(self.measured(case, clock, record["copy_bandwidth"]))
            print(report.case_text(record["cases"][-1]), flush=True)
        if self.linear and (costs := report.per_token(record["cases"])):
            record["per_token"] = costs
            print(report.per_token_text(costs), flush=True)
        if self.with_small:
            small = replace(self, tokens=SMALL_BATCH * SMALL_SEQLEN, compile=False)
            record["small"] = small.measure_small(small.case(SMALL_SEQLEN), clock)
            print(report.small_text(record["small"]), flush=True)
        report.write(record, self.out, self.plot, not self.no_plot)
        return 0

    def measured(self, case: Case, clock: Clock, bandwidth: float) -> dict[str, Any]:
        """Returns the record of a case, with one record per candidate in their order."""
        torch.compiler.reset()  # candidates made by torch.compile are for one shape each
        candidates, wanted = [c for c in case.candidates if self.wanted(c.name)], None
        for number, candidate in enumerate(candidates):
            with candidate.noting_failures(ours=number == 0) as record:
                results = both_passes(candidate)
                if number == 0:
                    wanted = results
                elif candidate.compared and wanted is not None:
                    error, least = largest_error(results, wanted), tolerance(case.dtype)
                    record |= {"error": error if math.isfinite(error) else None, "agrees": error <= least}
                del results
                record["peak_bytes"] = clock.peak_bytes(partial(both_passes, candidate))
        del wanted
        self.take_turns([candidate for candidate in candidates if candidate.ok], clock)
        ours = candidates[0].record.get("seconds")
        for candidate in filter(lambda candidate: candidate.ok, candidates):
            record, floor = candidate.record, candidate.floor
            medians = {name: seconds["median"] for name, seconds in record["seconds"].items()}
            if floor is not None:
                record["floor_bytes"] = floor
                record["over_floor"] = {name: medians[name] * bandwidth / floor[name] for name in PASSES}
            else:
                record["tokens_per_second"] = {name: case.batch * case.seqlen / medians[name] for name in PASSES}
            if ours:
                record["over_ours"] = {name: medians[name] / ours[name]["median"] for name in PASSES}
        return case._asdict() | {"candidates": [candidate.record for candidate in candidates]}

    def take_turns(self, candidates: list[Candidate], clock: Clock) -> None:
        """Times the candidates round by round, so that all meet the machine in the same condition."""
        times: list[list[tuple[float, ...]]] = [[] for _ in candidates]
        for turn, (candidate, mine) in product(range(self.rounds), list(zip(candidates, times, strict=True))):
            if not candidate.ok or (turn >= LEAST_ROUNDS and sum(map(sum, mine)) > self.budget):
                continue
            with candidate.noting_failures(ours=candidate is candidates[0]):
                forward, y = clock.seconds(candidate.run)
                backward, _ = clock.seconds(partial(torch.autograd.grad, y, candidate.leaves, candidate.cotangent))
                del y
                mine.append((forward, backward, clock.seconds(partial(both_passes, candidate))[0]))
        for candidate, mine in zip(candidates, times, strict=True):
            if candidate.ok:
                columns = dict(zip(PASSES, zip(*mine, strict=True), strict=True))
                candidate.record["seconds"] = {name: quartiles(column) for name, column in columns.items()}

    def measure_small(self, case: Case, clock: Clock) -> dict[str, Any]:
        """Returns the seconds of a training step of every candidate as the host launches it, as a replayed CUDA graph,
        and of its kernels by themselves; the latter two need a GPU."""
        candidates = [candidate for candidate in case.candidates if self.wanted(candidate.name)]
        for candidate in candidates:
            with candidate.noting_failures() as record:
                run = partial(both_passes, candidate)
                clock.wall_seconds(run, 3)
                repetitions = SMALL_REPETITIONS if clock.cuda else min(SMALL_REPETITIONS, self.rounds)
                record["one_by_one"] = clock.wall_seconds(run, repetitions)
                if clock.cuda:
                    record["kernels"] = kernel_seconds(run, clock)
                    record["graph"] = do_bench_cudagraph(run, return_mode="median") * 1e-3
                    record["graph_over_kernels"] = record["graph"] / record["kernels"]
        return case._asdict() | {"candidates": [candidate.record for candidate in candidates]}


def device_of(name: str) -> torch.device:
    """Returns a device that is there. Raises ValueError, one line, for any other."""
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not match:
        raise ValueError(f"--device {name}: no such device; give cuda or cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "there is no GPU here; run this on a machine with one, or try the program out in small with "
            "--device cpu --tokens 2048 --lengths 128,512 --dtype float32"
        )
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# -- Clocks ------------------------------------------------------------------------------------------------------------


def quartiles(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median of at least one time, and what a quarter of them stayed below and above."""
    low, median, high = torch.tensor(seconds).double().quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return {"median": median, "low": low, "high": high}


class Clock:
    """Times single runs on one device, on a GPU each from a cold second-level cache."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda:
            # Real models have filled the cache with other layers by then. Twice its size, written over, evicts it.
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self.eviction = torch.empty(max(size, 1 << 26), dtype=torch.uint8, device=device)

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Returns the time of one run, and what it returned."""
        if not self.cuda:
            start = time.perf_counter()
            result = run()
            return time.perf_counter() - start, result
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.eviction.zero_()  # which keeps the device busy while the host prepares the first launches
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3, result

    def wall_seconds(self, run: Callable[[], Any], repetitions: int = 1) -> float:
        """Returns the time of one of many runs in a row, the host's work included."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        self.synchronize()
        return (time.perf_counter() - start) / repetitions

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Returns by how many bytes the allocated memory grows at its highest while `run` runs; None without a GPU."""
        if not self.cuda:
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before


def median_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Returns the median time of a launch that has run before, on a GPU each from a cold second-level cache."""
    run()  # nothing is compiled or loaded when it is timed
    if device.type == "cuda":
        return do_bench(run, warmup=1, rep=20, return_mode="median") * 1e-3
    return Clock(device).seconds(run)[0]


def copy_bandwidth(clock: Clock, size: int | None = None, repetitions: int = 15) -> float:
    """Returns the bytes per second, read and written, of the device's copy of `size` bytes, by default 1 GiB on a GPU
    and 64 MiB elsewhere: far beyond every cache."""
    size = size or (1 << 30 if clock.cuda else 1 << 26)
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    times = [clock.seconds(lambda: target.copy_(source))[0] for _ in range(repetitions + 3)][3:]
    return 2 * size / statistics.median(times)


def kernel_seconds(run: Callable[[], Any], clock: Clock, repetitions: int = 10) -> float:
    """Returns the seconds that the device's kernels themselves take in one run, without the gaps between them."""
    run()
    clock.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        clock.wall_seconds(run, repetitions)
    return sum(event.self_device_time_total for event in record.key_averages()) * 1e-6 / repetitions


# -- Candidates --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Candidate:
    """One way to compute something, with gradients."""

    name: str
    run: Callable[[], Tensor]
    """The forward pass; raises `Missing` where there is none."""
    leaves: list[Tensor] = field(default_factory=list)
    """The tensors that gradients are taken of."""
    cotangent: Tensor | None = None
    """Of the output of `run`; None for a scalar."""
    compared: bool = True
    """Whether it should give the numbers that ours gives; else it is other mathematics at the same size."""
    floor: dict[str, int] | None = None
    """The least bytes of each pass."""
    record: dict[str, Any] = field(default_factory=dict)
    """What is known of it; "status" is "ok", or says why there is no more."""

    def __post_init__(self) -> None:
        self.record = {"candidate": self.name, "compared": self.compared, "status": "ok"} | self.record

    @property
    def ok(self) -> bool:
        return self.record["status"] == "ok"

    @contextlib.contextmanager
    def noting_failures(self, *, ours: bool = False) -> Iterator[dict[str, Any]]:
        """Gives the record, and writes what a peer runs into as its status instead of ending the program; ours must not
        fail."""
        try:
            yield self.record
            return
        except Missing as missing:
            self.record["status"] = str(missing)
        except torch.OutOfMemoryError:
            self.record["status"] = "out of memory"
        except Exception as error:
            if ours:
                raise
            self.record["status"] = f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0][:160]}"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Case(NamedTuple):
    """One size at which candidates meet; the first candidate is ours."""

    label: str
    kind: str
    """Cases of one kind form a line in the picture."""
    seqlen: int
    batch: int
    dtype: str
    candidates: list[Candidate]


def on_leaves(name: str, op: Op, leaves: list[Tensor], cotangent: Tensor, **options: bool) -> Candidate:
    """Returns a candidate that is a function of tensors, all differentiated. options: `compared`, and `output_read` as
    for `floor_of`."""
    floor = floor_of(leaves, cotangent, output_read=options.pop("output_read", False))
    return Candidate(name=name, run=partial(op, *leaves), leaves=leaves, cotangent=cotangent, floor=floor, **options)


def floor_of(inputs: Iterable[Tensor], output: Tensor, *, output_read: bool = False) -> dict[str, int]:
    """Returns the least bytes that any algorithm must move in each pass: every input and output, and every gradient,
    passes the memory once; between the two passes other layers run, so that nothing stays in a cache.

    output_read: whether the backward pass is given the output as well, as that of the MRU's scan is (dX and X, dH, H).
    """
    given, result = sum(x.nbytes for x in inputs), output.nbytes
    forward, backward = given + result, 2 * given + result * (2 if output_read else 1)
    return {"forward": forward, "backward": backward, "both": forward + backward}


def both_passes(candidate: Candidate) -> tuple[Tensor, ...]:
    y = candidate.run()
    return y.detach(), *torch.autograd.grad(y, candidate.leaves, candidate.cotangent)


def largest_error(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Returns the largest difference in output or a gradient, over the largest value of that tensor; inf for NaN."""
    errors = [
        ((a.float() - b.float()).abs().max() / b.abs().max().float().clamp(min=torch.finfo(torch.float32).tiny)).item()
        for a, b in zip(got, wanted, strict=True)
    ]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def tolerance(dtype: str) -> float:
    """Returns the error beyond which a candidate is said to differ: peers round intermediate results to their dtype."""
    return 0.01 if dtype == "float32" else 0.05
