"""`cpu`: all operations against their peers on the CPU, with peak memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from matmix.benchmarks import peers
from matmix.benchmarks.measure import Clock
from matmix.benchmarks.operations import EPS, both_ways, plain_conv, plain_norm, scan_given_decays
from matmix.benchmarks.report import RESULTS, columns, digits, environment_of, save
from matmix.kernels import gated_norm, matrix_product_scan, semiseparable_scan, short_conv
from matmix.launch.lab.measuring import peak_memory

SLOW = 2.0
"""Seconds: a candidate that takes longer both times that it is first tried is not timed again."""

Candidates = dict[str, Callable[[], object]]


def differentiated(op: peers.Op, inputs: Iterable[Tensor], cotangent: Tensor) -> Callable[[], object]:
    """Returns a call that runs `op` on the inputs and takes the gradients of all of them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(op(*leaves), leaves, cotangent)


def quasiseparable(seqlen: int = 2048, batch: int = 4, heads: int = 12, width: int = 64) -> Candidates:
    """Returns Hydra's mixer at d_state 64 against reversed copies in a causal scan, as published (ours, and the paper's
    left to autograd), its two recurrences in PyTorch, and attention of the same shape."""
    v, cotangent = torch.randn(2, batch, seqlen, heads, width)
    vectors = torch.randn(4, batch, seqlen, 1, width)
    scales = torch.rand(2, batch, seqlen, heads).mul_(0.1)
    inputs = [v, *vectors, *(-scale for scale in scales), *scales, torch.randn(batch, seqlen, heads)]
    # The same numbers as the causal layer takes them: log-decays are step sizes times a rate per head, here -1.
    steps = [v, *vectors, *scales, -torch.ones(heads), inputs[-1]]

    def attention(v: Tensor) -> Tensor:
        y = v.transpose(1, 2)
        return scaled_dot_product_attention(y, y, y).transpose(1, 2)

    return {
        "ours": differentiated(scan_given_decays, inputs, cotangent),
        "flipped, our causal": differentiated(peers.flipped(peers.our_causal), steps, cotangent),
        "flipped, plain SSD": differentiated(peers.flipped(peers.plain_causal), steps, cotangent),
        "attention (SDPA)": differentiated(attention, [v], cotangent),
        "recurrence": differentiated(peers.recurrent_quasiseparable, inputs, cotangent),
    }


def matrix_product(order: int) -> Candidates:
    """Returns the MRU's scan against those that mru-lm writes, each on the layout that suits it."""
    x = torch.linalg.qr(torch.randn(8, 1024, 6, order, order))[0].contiguous()
    cotangent = torch.randn_like(x)
    by_head, theirs = (y.transpose(1, 2).contiguous() for y in (x, cotangent))
    return {
        "ours": differentiated(matrix_product_scan, [x], cotangent),
        "Brent-Kung": differentiated(peers.product_by("brent_kung"), [by_head], theirs),
        "Hillis-Steele": differentiated(peers.product_by("hillis_steele"), [by_head], theirs),
        "sequential": differentiated(peers.product_by("sequential"), [by_head], theirs),
    }


def packed(op: peers.Op, *inputs: Tensor) -> Candidates:
    """Returns many short documents in one row against one row without boundaries: packing should cost nothing."""
    seqlen = inputs[0].shape[1]
    cuts = torch.randperm(seqlen - 1, generator=torch.Generator().manual_seed(0))[: seqlen // 150 - 1] + 1
    bounds = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])]).to(torch.int32)
    cotangent = torch.randn_like(inputs[0])
    return {
        "ours": differentiated(partial(op, cu_seqlens=bounds), inputs, cotangent),
        "ours, one document": differentiated(op, inputs, cotangent),
    }


def small(ours: Callable, name: str, plain: Callable, *shapes: tuple[int, ...]) -> Candidates:
    """Returns a small operation against PyTorch's under autograd, eager and compiled."""
    inputs = [torch.randn(shape) for shape in shapes]
    ops = {"ours": ours, **both_ways(name, plain)}
    return {name: differentiated(op, inputs, torch.randn_like(inputs[0])) for name, op in ops.items()}


CASES: dict[str, Callable[[], Candidates]] = {
    "quasiseparable, B 4, L 2048, 12 heads of 64, d_state 64": quasiseparable,
    **{f"matrix product, B 8, L 1024, 6 heads, o {o}": partial(matrix_product, o) for o in (4, 8, 16)},
    "short conv, B 2, L 2048, d 1792, width 7": partial(
        small, partial(short_conv, activation="silu"), "conv1d + silu", plain_conv, (2, 2048, 1792), (1792, 7), (1792,)
    ),
    "gated norm, 8192 rows of 1536": partial(
        small, partial(gated_norm, eps=EPS), "rms_norm * silu", plain_norm, (8192, 1536), (1536,), (8192, 1536)
    ),
    "packed semiseparable, L 8192, documents of about 150": lambda: packed(
        semiseparable_scan, torch.randn(1, 8192, 12, 64), *torch.randn(2, 1, 8192, 1, 64), -torch.rand(1, 8192, 12) / 10
    ),
    "packed matrix product, L 8192, documents of about 150": lambda: packed(
        matrix_product_scan, torch.linalg.qr(torch.randn(1, 8192, 6, 8, 8))[0].contiguous()
    ),
    "packed short conv, L 8192, documents of about 150": lambda: packed(
        short_conv, torch.randn(1, 8192, 896), torch.randn(896, 7)
    ),
}
"""Title -> its candidates; the first one, "ours", is what the others are divided by."""


def best_times(candidates: Candidates, rounds: int) -> dict[str, float]:
    """Returns the least seconds of each candidate over rounds that run all of them: whatever else runs on the machine
    only ever adds time."""
    clock = Clock(torch.device("cpu"))
    times = [[clock.seconds(run)[0] for run in candidates.values()] for _ in range(rounds)]
    return dict(zip(candidates, map(min, zip(*times, strict=True)), strict=True))


def peak_of(title: str, candidate: str, threads: int) -> int:
    """Returns the peak memory of one candidate, in bytes; for a fresh process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    run = CASES[title]()[candidate]
    run()  # libraries make their own buffers at the first call
    return peak_memory(run)


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """All operations against their peers on the CPU, float32, forward and backward.

    Peak memory is the growth of the resident set of a fresh process that runs one candidate once. Leave the machine
    alone meanwhile.
    """

    only: str = ""
    """Measure the cases whose title contains this text."""
    rounds: int = 15
    """How often the candidates of a case take turns."""
    threads: int = 2
    """Of every process."""
    out: Path = RESULTS / "cpu.json"
    """JSON."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        torch.set_num_threads(self.threads)
        # Where every large block goes back to the system, the resident set is what is in use.
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(self.threads)}
        record = {"environment": environment_of(torch.device("cpu")), "cases": {}}
        for title in CASES:
            if self.only in title:
                record["cases"][title] = case = self.measure(title)
                rows = [["candidate", "ms", "MB", "time over ours", "memory over ours"]]
                for name, one in case.items():
                    ratios = [f"{one[key] / max(case['ours'][key], 1e-9):.2f}" for key in ("seconds", "peak_bytes")]
                    rows.append([f"  {name}", digits(one["seconds"], 1e-3), digits(one["peak_bytes"], 2**20), *ratios])
                print(f"{title}\n{columns(rows)}", flush=True)
        save(record, self.out)
        return 0

    def measure(self, title: str) -> dict[str, dict[str, float]]:
        torch.manual_seed(0)
        candidates = CASES[title]()
        times = best_times(candidates, 2)
        times |= best_times({name: run for name, run in candidates.items() if times[name] < SLOW}, self.rounds)
        case = {}
        for name in candidates:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                peak = process.submit(peak_of, title, name, self.threads).result()
            case[name] = {"seconds": times[name], "peak_bytes": peak}
        return case
