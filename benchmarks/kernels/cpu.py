"""`cpu`: all ops against their peers on the CPU, float32, forward and backward.

Prints one line per case with forward + backward times and, per peer, how many times our time and our peak
memory it takes; writes the same with hardware, versions and date as JSON (--out). `--only TEXT` picks cases
by their title. Peak memory is the growth of the resident set of a fresh process that runs one candidate once.

Leave the machine alone meanwhile. OpenMP's idle threads sleep (OMP_WAIT_POLICY=PASSIVE, as in training): where they
spin, any other busy process, such as those that torch.compile starts, makes code of many short parallel regions many
times slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from matmix.benchmarks.measuring.plot import draw
from matmix.benchmarks.measuring.settings import RESULTS
from matmix.benchmarks.measuring.timing import best_times
from matmix.benchmarks.peers.flipped import flipped, our_causal, plain_causal
from matmix.benchmarks.peers.packages import HOW
from matmix.benchmarks.peers.scans import BrentKungProduct, recurrent_quasiseparable
from matmix.kernels import (
    gated_norm,
    matrix_product_scan,
    quasiseparable_scan,
    semiseparable_scan,
    short_conv,
)
from matmix.launch.lab.measuring import environment, peak_memory

SLOW = 2.0
"""Seconds: a candidate that takes longer both times that it is first tried is not timed again."""

Candidates = dict[str, Callable[[], object]]


def forward_backward(op: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor) -> Callable[[], object]:
    """A call that runs `op` on the inputs and takes the gradients of all of them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(op(*leaves), leaves, cotangent)


def boundaries(seqlen: int, mean: int) -> Tensor:
    """cu_seqlens of documents of random lengths around `mean` that fill a row."""
    draw = torch.Generator().manual_seed(0)
    cuts = torch.randperm(seqlen - 1, generator=draw)[: seqlen // mean - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])]).to(torch.int32)


def quasiseparable(seqlen: int = 2048, batch: int = 4, heads: int = 12, width: int = 64) -> Candidates:
    """Hydra's mixer at d_state 64 against what is published, reversed copies in a causal scan (ours, and the paper's
    left to autograd), its two recurrences in PyTorch, and attention of the same shape.
    """
    v, cotangent = torch.randn(2, batch, seqlen, heads, width).unbind(0)
    vectors = list(torch.randn(4, batch, seqlen, 1, width).unbind(0))
    scales = list(torch.rand(2, batch, seqlen, heads).mul_(0.1).unbind(0))
    decays = [-scale for scale in scales]
    inputs = [v, *vectors, *decays, *scales, torch.randn(batch, seqlen, heads)]

    def ours(v, qf, kf, qb, kb, af, ab, wf, wb, d):
        return quasiseparable_scan(
            v, qf, kf, qb, kb, af, ab, input_scale_forward=wf, input_scale_backward=wb, diagonal=d
        )

    def attention(v):
        y = v.transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y).transpose(1, 2)

    # The same numbers as the causal layer takes them: log-decays are step sizes times a rate per head, here -1.
    steps = [v, *vectors, *scales, -torch.ones(heads), inputs[-1]]
    return {
        "ours": forward_backward(ours, inputs, cotangent),
        "flipped, our causal": forward_backward(flipped(our_causal), steps, cotangent),
        "flipped, plain SSD": forward_backward(flipped(plain_causal), steps, cotangent),
        "attention (SDPA)": forward_backward(attention, [v], cotangent),
        "recurrence": forward_backward(recurrent_quasiseparable, inputs, cotangent),
    }


def matrix_product(order: int, seqlen: int = 1024, batch: int = 8, heads: int = 6) -> Candidates:
    """The MRU's scan against Brent and Kung's, each on the layout that suits it."""
    x = torch.linalg.qr(torch.randn(batch, seqlen, heads, order, order))[0].contiguous()
    cotangent = torch.randn_like(x)
    by_head = [y.transpose(1, 2).contiguous() for y in (x, cotangent)]
    return {
        "ours": forward_backward(matrix_product_scan, [x], cotangent),
        "Brent-Kung": forward_backward(BrentKungProduct.apply, by_head[:1], by_head[1]),
    }


def packed(op: str, seqlen: int = 8192, mean: int = 150) -> Candidates:
    """Many short documents in one row against one row without boundaries: packing should cost nothing."""
    bounds = boundaries(seqlen, mean)
    if op == "matrix product":
        x = torch.linalg.qr(torch.randn(1, seqlen, 6, 8, 8))[0].contiguous()
        inputs, call = [x], matrix_product_scan
    elif op == "short conv":
        inputs, call = [torch.randn(1, seqlen, 896), torch.randn(896, 7)], short_conv
    else:
        v, vectors = torch.randn(1, seqlen, 12, 64), list(torch.randn(2, 1, seqlen, 1, 64).unbind(0))
        inputs, call = [v, *vectors, -0.1 * torch.rand(1, seqlen, 12)], semiseparable_scan
    cotangent = torch.randn_like(inputs[0])
    return {
        "ours": forward_backward(lambda *t: call(*t, cu_seqlens=bounds), inputs, cotangent),
        "ours, one document": forward_backward(call, inputs, cotangent),
    }


def conv(seqlen: int = 2048, batch: int = 2, d: int = 1792) -> Candidates:
    """Hydra's convolution (width 7, SiLU) against conv1d over channels-first views, eager and compiled."""
    x, cotangent = torch.randn(2, batch, seqlen, d).unbind(0)
    weight, bias = torch.randn(d, 7), torch.randn(d)

    def plain(x, weight, bias):
        y = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=d)
        return torch.nn.functional.silu(y).transpose(1, 2)

    return {
        "ours": forward_backward(lambda *t: short_conv(*t, activation="silu"), [x, weight, bias], cotangent),
        "conv1d + silu": forward_backward(plain, [x, weight, bias], cotangent),
        "conv1d + silu compiled": forward_backward(torch.compile(plain, dynamic=False), [x, weight, bias], cotangent),
    }


def norm(rows: int = 8192, d: int = 1536) -> Candidates:
    """Gated RMSNorm against the same line of PyTorch under autograd, eager and compiled."""
    x, gate, cotangent = torch.randn(3, rows, d).unbind(0)
    weight = torch.randn(d)

    def plain(x, weight, gate):
        return torch.nn.functional.rms_norm(x, (d,), weight, 1e-5) * torch.nn.functional.silu(gate)

    return {
        "ours": forward_backward(gated_norm, [x, weight, gate], cotangent),
        "rms_norm * silu": forward_backward(plain, [x, weight, gate], cotangent),
        "rms_norm * silu compiled": forward_backward(torch.compile(plain, dynamic=False), [x, weight, gate], cotangent),
    }


CPU_CASES: dict[str, Callable[[], Candidates]] = {
    "quasiseparable, B 4, L 2048, 12 heads of 64, d_state 64": quasiseparable,
    "matrix product, B 8, L 1024, 6 heads, o 4": lambda: matrix_product(4),
    "matrix product, B 8, L 1024, 6 heads, o 8": lambda: matrix_product(8),
    "matrix product, B 8, L 1024, 6 heads, o 16": lambda: matrix_product(16),
    "short conv, B 2, L 2048, d 1792, width 7": conv,
    "gated norm, 8192 rows of 1536": norm,
    "packed semiseparable, L 8192, documents of about 150": lambda: packed("semiseparable"),
    "packed matrix product, L 8192, documents of about 150": lambda: packed("matrix product"),
    "packed short conv, L 8192, documents of about 150": lambda: packed("short conv"),
}
"""Title -> its candidates; the first one, "ours", is what the others are divided by."""


def measured_case(title: str, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Best seconds and peak bytes of every candidate of a case."""
    torch.manual_seed(0)
    candidates = CPU_CASES[title]()
    first = best_times(candidates, 2)
    quick = {name: run for name, run in candidates.items() if first[name] < SLOW}
    times = first | best_times(quick, rounds)
    return {name: {"seconds": times[name], "peak_bytes": memory_of(title, name, threads)} for name in candidates}


def memory_of(title: str, candidate: str, threads: int) -> int:
    """Peak memory of one candidate in a process of its own, where every large block goes back to the
    system.
    """
    command = [sys.executable, "-P", "-m", "matmix.benchmarks", "cpu_memory", title, candidate]
    environ = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def memory_command(title: str, candidate: str) -> None:
    torch.manual_seed(0)
    run = CPU_CASES[title]()[candidate]
    run()  # libraries make their own buffers at the first call
    print(peak_memory(run))


def describe(title: str, found: dict[str, dict[str, float]]) -> str:
    ours = found["ours"]
    lines = [f"{title}\n  {'ours':<22}{ours['seconds'] * 1e3:10.1f} ms {ours['peak_bytes'] / 2**20:9.1f} MB"]
    for name, peer in found.items():
        if name != "ours":
            faster = peer["seconds"] / ours["seconds"]
            share = ours["peak_bytes"] / max(peer["peak_bytes"], 1)
            lines.append(
                f"  {name:<22}{peer['seconds'] * 1e3:10.1f} ms {peer['peak_bytes'] / 2**20:9.1f} MB"
                f"   ours is {faster:.2f} x as fast with {share:.2f} x the memory"
            )
    return "\n".join(lines)


def cpu_command(only: str, rounds: int, threads: int, out: Path, plot: Path | None) -> None:
    torch.set_num_threads(threads)
    results = {}
    for title in CPU_CASES:
        if only in title:
            results[title] = measured_case(title, rounds, threads)
            print(describe(title, results[title]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(distributions=("triton", *HOW)), "cases": results}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {out}")
    if plot is not None:
        draw(record, plot)
        print(f"drawn in {plot}")


def main(arguments: list[str]) -> None:
    """The command `cpu`."""
    parser = argparse.ArgumentParser(prog="python -P -m matmix.benchmarks cpu", description=__doc__)
    parser.add_argument("--only", default="", help="measure the cases whose title contains this text")
    parser.add_argument("--rounds", type=int, default=15, help="how often the candidates of a case take turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json")
    parser.add_argument("--plot", type=Path, default=None, help="also draw the ratios into this file (PNG, SVG, PDF)")
    options = parser.parse_args(arguments)
    cpu_command(options.only, options.rounds, options.threads, options.out, options.plot)


def memory_main(arguments: list[str]) -> None:
    """The command `cpu_memory`."""
    parser = argparse.ArgumentParser(prog="python -P -m matmix.benchmarks cpu_memory")
    parser.add_argument("title", choices=list(CPU_CASES))
    parser.add_argument("candidate")
    options = parser.parse_args(arguments)
    memory_command(options.title, options.candidate)
