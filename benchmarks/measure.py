"""Measures the candidates of one case against each other: first whether they agree, then how long they take."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

from matmix.benchmarks import report

PASSES = ("forward", "backward", "both")
LEAST_ROUNDS = 5
SMALL_BATCH, SMALL_SEQLEN, SMALL_REPETITIONS = 16, 128, 50
"""The case in which launches one by one are compared with a CUDA graph, and how often each runs."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Options that all speed commands take, and how such a command runs."""

    command: ClassVar[str]
    linear: ClassVar[bool] = False
    """Whether ours should cost the same per token at all lengths, so that it is shown whether it does."""
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
        """Raises ValueError, one line, for what cannot be."""
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
        """Returns device and dtype of new tensors."""
        return {"device": device_of(self.device), "dtype": getattr(torch, self.dtype)}

    def batch(self, seqlen: int) -> int:
        """Returns the number of sequences in a case."""
        return max(1, self.tokens // seqlen)

    def wanted(self, name: str) -> bool:
        """Returns whether a candidate is measured; ours always is."""
        return name == "ours" or not self.only or any(text and text in name for text in self.only.split(","))

    def cases(self) -> Iterator[Case]:
        """Yields one case after the other, so that the tensors of one live no longer than it."""
        raise NotImplementedError

    def small_case(self) -> Case | None:
        """Returns the case for which CUDA graphs are compared, if there is one."""
        return None

    def small(self) -> Speed:
        """Returns these options for a small case."""
        return replace(self, tokens=SMALL_BATCH * SMALL_SEQLEN, compile=False)

    def run(self, rest: list[str], typed: list[str]) -> int:
        """Measures, prints, writes and draws; returns the exit code."""
        self.check()
        device = device_of(self.device)
        clock = Clock(device)
        record: dict[str, Any] = {
            "command": self.command,
            "environment": report.environment_of(device, self.dtype or "each case in its own dtype"),
            "tokens": self.tokens,
            "d_model": self.d_model,
            "copy_bandwidth": copy_bandwidth(clock),
            "cases": [],
        }
        print(report.opening(record), flush=True)
        for case in self.cases():
            record["cases"].append(measured(case, self, clock, record["copy_bandwidth"]))
            print(report.case_text(record["cases"][-1]), flush=True)
        if self.linear and (costs := report.per_token(record["cases"])):
            record["per_token"] = costs
            print(report.per_token_text(costs), flush=True)
        case = self.small_case()
        if case is not None:
            record["small"] = measure_small(case, self, clock)
            print(report.small_text(record["small"]), flush=True)
        report.write(record, self.out, self.plot, not self.no_plot)
        return 0


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


class Quartiles(NamedTuple):
    """Seconds of repeated runs: the median, and what a quarter of them stayed below and above."""

    median: float
    low: float
    high: float


def quartiles(seconds: list[float]) -> Quartiles:
    """Returns the quartiles of at least one time."""
    if len(seconds) == 1:
        return Quartiles(seconds[0], seconds[0], seconds[0])
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Quartiles(median, low, high)


class Clock:
    """Times single runs on one device, on a GPU each from a cold second-level cache."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
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

    def wall_seconds(self, run: Callable[[], Any], repetitions: int) -> float:
        """Returns the time of one of many runs in a row, the host's work included."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        self.synchronize()
        return (time.perf_counter() - start) / repetitions

    def synchronize(self) -> None:
        """Waits until the device has done all it was given."""
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


def graph_of(run: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Captures `run` in a CUDA graph; calling what is returned launches all of it at once."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # whatever is prepared at the first calls must not be captured
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(kept: Any = kept) -> None:  # outputs live in the graph's memory as long as this function
        graph.replay()

    return replay


def kernel_seconds(run: Callable[[], Any], clock: Clock, repetitions: int = 10) -> float:
    """Returns the seconds that the device's kernels themselves take in one run, without the gaps between them."""
    run()
    clock.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(repetitions):
            run()
        clock.synchronize()
    return sum(event.self_device_time_total for event in record.key_averages()) * 1e-6 / repetitions


# -- Candidates --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Candidate:
    """One way to compute something, with gradients."""

    name: str
    run: Callable[[], Tensor] | None = None
    """The forward pass."""
    leaves: list[Tensor] = field(default_factory=list)
    """The tensors that gradients are taken of."""
    cotangent: Tensor | None = None
    """Of the output of `run`; None for a scalar."""
    compared: bool = True
    """Whether it should give the numbers that ours gives; else it is other mathematics at the same size."""
    floor: dict[str, int] | None = None
    """The least bytes of each pass."""
    facts: dict[str, Any] = field(default_factory=dict)
    """More for the record."""
    missing: str = ""
    """Why it cannot run here; it is then only named."""


@dataclass(kw_only=True, slots=True)
class Case:
    """One size at which candidates meet; the first candidate is ours."""

    label: str
    seqlen: int
    batch: int
    candidates: list[Candidate]
    kind: str = ""
    """Cases of one kind form a line in the picture."""
    dtype: str = ""
    """What it is computed in, if not in the options' dtype."""


def on_leaves(
    name: str, op: Callable[..., Tensor], leaves: list[Tensor], cotangent: Tensor, *,
    compared: bool = True, output_read: bool = False,
) -> Candidate:  # fmt: skip
    """Returns a candidate that is a function of tensors, all differentiated; `output_read` as for `floor_of`."""
    floor = floor_of(leaves, cotangent, output_read=output_read)
    return Candidate(
        name=name, run=lambda: op(*leaves), leaves=leaves, cotangent=cotangent, compared=compared, floor=floor
    )


def floor_of(inputs: Iterable[Tensor], output: Tensor, *, output_read: bool = False) -> dict[str, int]:
    """Returns the least bytes that any algorithm must move in each pass: every input and output, and every gradient,
    passes the memory once; between the two passes other layers run, so that nothing stays in a cache.

    output_read: whether the backward pass is given the output as well, as that of the MRU's scan is (dX and X, dH, H).
    """
    given = sum(x.numel() * x.element_size() for x in inputs)
    result = output.numel() * output.element_size()
    forward, backward = given + result, 2 * given + result * (2 if output_read else 1)
    return {"forward": forward, "backward": backward, "both": forward + backward}


def both_passes(candidate: Candidate) -> tuple[Tensor, ...]:
    """Returns output and gradients."""
    y = candidate.run()
    return y.detach(), *gradients(candidate, y)


def gradients(candidate: Candidate, y: Tensor) -> tuple[Tensor, ...]:
    """Runs the backward pass."""
    return torch.autograd.grad(y, candidate.leaves, candidate.cotangent)


def largest_error(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Returns the largest difference in output or a gradient, over the largest value of that tensor; inf for NaN."""

    def of(a: Tensor, b: Tensor) -> float:
        scale = b.abs().max().float().clamp(min=torch.finfo(torch.float32).tiny)
        error = ((a.float() - b.float()).abs().max() / scale).item()
        return error if error == error else float("inf")

    return max(of(a, b) for a, b in zip(got, wanted, strict=True))


def tolerance(dtype: str) -> float:
    """Returns the error beyond which a candidate is said to differ: peers round intermediate results to their dtype."""
    return 0.01 if dtype == "float32" else 0.05


@contextlib.contextmanager
def noting_failures(record: dict[str, Any], *, ours: bool = False) -> Iterator[None]:
    """Writes what a peer runs into as its status instead of ending the program; ours must not fail."""
    try:
        yield
        return
    except torch.OutOfMemoryError:
        record["status"] = "out of memory"
    except Exception as error:
        if ours:
            raise
        record["status"] = f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0][:160]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(case: Case, options: Speed, clock: Clock, bandwidth: float) -> dict[str, Any]:
    """Returns the record of a case, with one record per candidate in their order."""
    torch.compiler.reset()  # candidates made by torch.compile are for one shape each
    dtype = case.dtype or options.dtype
    candidates = [candidate for candidate in case.candidates if options.wanted(candidate.name)]
    records = [{"candidate": c.name, "compared": c.compared, "status": c.missing or "ok"} | c.facts for c in candidates]
    pairs = list(zip(candidates, records, strict=True))
    wanted = None
    for candidate, record in pairs:
        if not candidate.missing:
            with noting_failures(record, ours=candidate is candidates[0]):
                results = both_passes(candidate)
                if candidate is candidates[0]:
                    wanted = results
                elif candidate.compared and wanted is not None:
                    error = largest_error(results, wanted)
                    record |= {"error": error if math.isfinite(error) else None, "agrees": error <= tolerance(dtype)}
                del results
                record["peak_bytes"] = clock.peak_bytes(lambda candidate=candidate: both_passes(candidate))
    del wanted
    take_turns([pair for pair in pairs if pair[1]["status"] == "ok"], options, clock)
    ours = records[0].get("seconds")
    for candidate, record in pairs:
        if record["status"] != "ok":
            continue
        medians = {name: record["seconds"][name]["median"] for name in PASSES}
        if (floor := candidate.floor) is not None:
            record["floor_bytes"] = floor
            record["over_floor"] = {name: medians[name] * bandwidth / floor[name] for name in PASSES}
        else:
            record["tokens_per_second"] = {name: case.batch * case.seqlen / medians[name] for name in PASSES}
        if ours:
            record["over_ours"] = {name: medians[name] / ours[name]["median"] for name in PASSES}
    where = {"label": case.label, "kind": case.kind, "seqlen": case.seqlen, "batch": case.batch, "dtype": dtype}
    return where | {"candidates": records}


def take_turns(pairs: list[tuple[Candidate, dict[str, Any]]], options: Speed, clock: Clock) -> None:
    """Times the candidates round by round, so that all meet the machine in the same condition."""
    times: dict[str, dict[str, list[float]]] = {c.name: {name: [] for name in PASSES} for c, _ in pairs}
    for turn in range(options.rounds):
        for candidate, record in pairs:
            mine = times[candidate.name]
            spent = sum(map(sum, mine.values()))
            if record["status"] != "ok" or (turn >= LEAST_ROUNDS and spent > options.budget):
                continue
            with noting_failures(record, ours=candidate is pairs[0][0]):
                forward, y = clock.seconds(candidate.run)
                backward, _ = clock.seconds(lambda candidate=candidate, y=y: gradients(candidate, y))
                del y
                both, _ = clock.seconds(lambda candidate=candidate: both_passes(candidate))
                for name, seconds in zip(PASSES, (forward, backward, both), strict=True):
                    mine[name].append(seconds)
    for candidate, record in pairs:
        if record["status"] == "ok":
            record["seconds"] = {name: quartiles(values)._asdict() for name, values in times[candidate.name].items()}


def measure_small(case: Case, options: Speed, clock: Clock) -> dict[str, Any]:
    """Returns the seconds of a training step of every candidate as the host launches it, as a replayed CUDA graph, and
    of its kernels by themselves; the latter two need a GPU."""
    records = []
    for candidate in case.candidates:
        if not options.wanted(candidate.name):
            continue
        record: dict[str, Any] = {"candidate": candidate.name, "status": candidate.missing or "ok"}
        records.append(record)
        if candidate.missing:
            continue
        with noting_failures(record):

            def run(candidate: Candidate = candidate) -> tuple[Tensor, ...]:
                return both_passes(candidate)

            for _ in range(3):
                run()
            repetitions = SMALL_REPETITIONS if clock.cuda else min(SMALL_REPETITIONS, options.rounds)
            record["one_by_one"] = clock.wall_seconds(run, repetitions)
            if clock.cuda:
                record["kernels"] = kernel_seconds(run, clock)
                record["graph"] = clock.wall_seconds(graph_of(run, clock.device), repetitions)
                record["graph_over_kernels"] = record["graph"] / record["kernels"]
    return {"label": case.label, "seqlen": case.seqlen, "batch": case.batch, "candidates": records}
