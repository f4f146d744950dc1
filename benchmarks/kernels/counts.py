"""What kernels cost, counted in compiled code: `python -P -m matmix.benchmarks counts`.

For each launch of the calls that models make most: the warp-instructions and the bytes of memory per token, and what
limits how many warps run side by side. The counts are kept in results/counts.json. `counts --check mix state_pass`
compiles these kernels again, and ends with status 1 where a count has grown by more than a twentieth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from matmix.benchmarks.compiling import Resources, compilation, resident_warps
from matmix.benchmarks.kernels.calls import BATCH, SEQLEN
from matmix.benchmarks.kernels.resources import Recorded, compile_all, launches
from matmix.kernels.launching import Launch

COUNTS = Path(__file__).parents[1] / "results" / "counts.json"
TARGET = "sm_90"
TOLERANCE = 0.05
"""How much more than before a kernel may cost."""
COUNTED = (
    "Hydra, one group,",
    "SSD,",
    "width 7 centred, packed, silu,",
    "groups of 1536 in 1536,",
    "a Hydra layer,",
    "LION, selective gates,",
    "cayley, order 16, rows,",
    "cayley, order 8, rows,",
    "affine, order 8, rows,",
)
"""Beginnings of titles of the calls, each in bfloat16."""


def _scan_loops(names: dict[str, Any]) -> tuple[float, ...]:
    """Heads, or the tiles of a document, and in them the chunk's other tiles on one side of that tile, on average."""
    heads, others = names["HEADS"], (names["CHUNK"] // names["TILE"] - 1) / 2
    if names["WALK"]:
        heads = math.ceil(names["seqlen"] / names["TILE"])
    return (heads, others) if heads > 1 else (others,)


def _chunk(names: dict[str, Any]) -> tuple[float, ...]:
    """Steps of a chunk of the matrix product, of which there may be fewer than one chunk has."""
    return (min(names["CHUNK"], names["seqlen"]),)


def _groups(names: dict[str, Any]) -> tuple[float, ...]:
    """Groups of a chunk, and the tokens of a group."""
    return _chunk(names)[0] / names["GROUP"], names["GROUP"]


def _directions(names: dict[str, Any]) -> int:
    return 2 if names["TWO"] else 1


LOOPS: dict[str, Callable[[dict[str, Any]], tuple[float, ...]]] = {
    # One program of all fills the triangle.
    "decay_sums": lambda _: (0,),
    "mix": _scan_loops,
    "pair_gradients": lambda names: (names["HEADS"],),
    # The code of readers and writers stands in one kernel, and a program runs one of them.
    "vector_gradients": lambda names: (names["HEADS"] / 2, 1),
    "state_pass": lambda names: (math.ceil(names["seqlen"] / names["TILE"]) / _directions(names),),
    "_convolve": lambda names: (names["SPAN"] / names["ROWS"],),
    "_conv_gradients": lambda names: (names["walk"], (names["SPAN"] + names["WIDTH"] - 1) / names["ROWS"]),
    "_gradients": lambda names: (names["walk"],),
    "step_gradients": lambda names: (names["walk"],),
    # The code has four loops over the sums of programs, of which a program runs one; those of the norm are the longest.
    "add_programs": lambda names: (math.ceil(names["norm_programs"] / names["PROGRAMS"]) / 4,),
    "cayley_pass": lambda names: (names["ORDER"] / 2,),
    "polish_pass": lambda names: (names["COUNT"],),
    "products_pass": _chunk,
    "outputs_pass": _chunk,
    "collect_pass": _chunk,
    "gradients_pass": _groups,
    "prefix_pass": _chunk,
    "suffix_pass": _chunk,
    "_statistics": lambda names: (math.ceil(names["group"] / names["COLUMNS"]),),
}
"""By kernel, how often its loops run, from the outermost on, given its arguments by name. What is not here has none."""


class Count(NamedTuple):
    """One launch on sm_90."""

    op: str
    call: str
    number: int
    """Among the call's launches."""
    kernel: str
    warp_instructions: float
    """Per token."""
    bytes: float
    """Per token, if each tensor of the launch is read or written once."""
    registers: int
    spill_bytes: int
    resident_warps: int
    float64: int
    """Instructions in the code that compute with doubles."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.op, self.call, self.number, self.kernel


def counted_launches() -> Iterator[tuple[int, Recorded]]:
    """The launches to count, with their numbers in their calls."""
    found = [x for x in launches() if x.call.dtype == torch.bfloat16]
    for title in COUNTED:
        of_call = [x for x in found if f"{x.call.title},".startswith(title)]
        # The call as it is comes first; what configurations force upon it follows.
        names = dict.fromkeys((x.call.op, x.call.title) for x in of_call)
        for op, call in names:
            own = [x for x in of_call if (x.call.op, x.call.title) == (op, call)]
            yield from enumerate(own[: own[0].calls])


def count(number: int, recorded: Recorded, found: Resources) -> Count:
    """What one launch costs."""
    launch = recorded.launch
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    loops = LOOPS[found.kernel](arguments) if found.kernel in LOOPS else ()
    issued, times = 0.0, 1.0
    for depth, instructions in enumerate(found.instructions):
        if depth:
            times *= loops[depth - 1] if depth <= len(loops) else 1
        issued += times * instructions
    tokens = BATCH * SEQLEN
    issued *= launch.num_warps * math.prod(launch.grid) / tokens
    moved = _bytes(launch) / tokens
    warps = resident_warps(found)
    return Count(
        recorded.call.op, recorded.call.title, number, found.kernel, round(issued, 1), round(moved, 1),
        found.registers, found.spill_bytes, warps, found.float64,
    )  # fmt: skip


def _bytes(launch: Launch) -> int:
    """Of the launch's tensors, each once."""
    tensors = {}
    for x in launch.arguments:
        if isinstance(x, torch.Tensor):
            tensors[x.untyped_storage()._cdata, x.storage_offset(), x.shape] = x.numel() * x.element_size()
    return sum(tensors.values())


def read() -> list[Count]:
    """The counts that are kept."""
    return [Count(**row) for row in json.loads(COUNTS.read_text())["launches"]]


def write(counts: list[Count], version: str) -> None:
    """Keep these counts, made with a version of Triton."""
    about = {"target": TARGET, "triton": version, "tokens": BATCH * SEQLEN}
    rows = ",\n  ".join(json.dumps(x._asdict()) for x in counts)
    COUNTS.write_text(f'{json.dumps(about)[:-1]}, "launches": [\n  {rows}\n]}}\n')


def text(counts: list[Count]) -> str:
    """A table with the sums of each call."""
    lines = [("call", "kernel", "warp-instr./token", "bytes/token", "registers", "spills", "warps")]
    for op, call in dict.fromkeys((x.op, x.call) for x in counts):
        own = [x for x in counts if (x.op, x.call) == (op, call)]
        for x in own:
            numbers = (f"{x.warp_instructions:,.0f}", f"{x.bytes:,.0f}", x.registers, x.spill_bytes, x.resident_warps)
            lines.append((f"{op}: {call}", x.kernel, *map(str, numbers)))
        total = (f"{sum(x.warp_instructions for x in own):,.0f}", f"{sum(x.bytes for x in own):,.0f}")
        lines.append((f"{op}: {call}", "all", *total, "", "", ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def measured(found: list[tuple[int, Recorded]], workers: int) -> list[Count]:
    """Compile and count these launches."""
    wanted = [compilation(x.launch, TARGET) for _, x in found]
    once = {job.key: (job.key, job) for job in wanted}
    results = dict(compile_all(once, workers))
    return [count(number, x, results[job.key]) for (number, x), job in zip(found, wanted, strict=True)]


def grown(kept: list[Count], found: list[Count]) -> list[str]:
    """What costs more in `found` than in `kept`, a line each; a launch that is not kept counts as grown."""
    before = {x.key: x for x in kept}
    lines = []
    for now in found:
        name = f"{now.op}: {now.call}, {now.kernel} (launch {now.number})"
        if now.key not in before:
            lines.append(f"{name}: was not counted before")
            continue
        then = before[now.key]
        for what in ("warp_instructions", "bytes", "registers", "spill_bytes", "float64"):
            if getattr(now, what) > getattr(then, what) * (1 + TOLERANCE):
                lines.append(f"{name}: {what} {getattr(then, what):,.0f} -> {getattr(now, what):,.0f}")
        if now.resident_warps < then.resident_warps:
            lines.append(f"{name}: resident_warps {then.resident_warps} -> {now.resident_warps}")
    return lines


def check(kernels: list[str], workers: int) -> int:
    """Compare what these kernels cost with what is kept."""
    found = list(counted_launches())
    names = {x.launch.kernel.__name__ for _, x in found}
    if unknown := sorted(set(kernels) - names):
        raise ValueError(f"no kernel {unknown[0]!r} is counted; there are {', '.join(sorted(names))}")
    lines = grown(read(), measured([x for x in found if x[1].launch.kernel.__name__ in kernels], workers))
    print("\n".join(lines) or f"{', '.join(kernels)}: no more than is kept in {COUNTS}")
    return 1 if lines else 0


def main(arguments: list[str]) -> int:
    """The command: count everything and keep it, or check some of it."""
    parser = argparse.ArgumentParser(prog="python -P -m matmix.benchmarks counts", description=__doc__)
    parser.add_argument("--check", nargs="+", metavar="KERNEL", help="compare with what is kept, and keep nothing")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="compiling processes")
    options = parser.parse_args(arguments)
    if options.check:
        return check(options.check, options.workers)
    counts = measured(list(counted_launches()), options.workers)
    write(counts, triton.__version__)
    print(text(counts))
    print(f"kept in {COUNTS}")
    return 0
