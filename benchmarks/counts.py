"""`counts`: what kernels cost, counted in compiled code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from matmix.benchmarks.calls import BATCH, SEQLEN
from matmix.benchmarks.compiling import Resources, compilation, resident_warps
from matmix.benchmarks.report import RESULTS, columns
from matmix.benchmarks.resources import CORES, Recorded, compile_all, launches
from matmix.kernels.launching import Launch

COUNTS = RESULTS / "counts.json"
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
    """Returns heads, or the tiles of a document, and in them the chunk's other tiles on one side of that tile, on
    average."""
    heads, others = names["HEADS"], (names["CHUNK"] // names["TILE"] - 1) / 2
    if names["WALK"]:
        heads = math.ceil(names["seqlen"] / names["TILE"])
    return (heads, others) if heads > 1 else (others,)


def _chunk(names: dict[str, Any]) -> tuple[float, ...]:
    """Returns steps of a chunk of the matrix product, of which there may be fewer than one chunk has."""
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
    """Yields the launches to count, with their numbers in their calls."""
    recorded = [x for x in launches() if x.call.dtype == torch.bfloat16]
    for title in COUNTED:
        of_title = [x for x in recorded if f"{x.call.title},".startswith(title)]
        # The call as it is comes first; what configurations force upon it follows.
        for op, call in dict.fromkeys((x.call.op, x.call.title) for x in of_title):
            own = [x for x in of_title if (x.call.op, x.call.title) == (op, call)]
            yield from enumerate(own[: own[0].calls])


def count(number: int, recorded: Recorded, kernel: Resources) -> Count:
    """Returns what one launch costs."""
    launch = recorded.launch
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    loops = LOOPS[kernel.kernel](arguments) if kernel.kernel in LOOPS else ()
    issued, times = 0.0, 1.0
    for depth, instructions in enumerate(kernel.instructions):
        if depth:
            times *= loops[depth - 1] if depth <= len(loops) else 1
        issued += times * instructions
    tokens = BATCH * SEQLEN
    issued *= launch.num_warps * math.prod(launch.grid) / tokens
    return Count(
        recorded.call.op, recorded.call.title, number, kernel.kernel, round(issued, 1),
        round(moved_bytes(launch) / tokens, 1), kernel.registers, kernel.spill_bytes, resident_warps(kernel),
        kernel.float64,
    )  # fmt: skip


def moved_bytes(launch: Launch) -> int:
    """Returns the bytes of the launch's tensors, each once."""
    tensors = {}
    for x in launch.arguments:
        if isinstance(x, torch.Tensor):
            tensors[x.untyped_storage()._cdata, x.storage_offset(), x.shape] = x.numel() * x.element_size()
    return sum(tensors.values())


def read() -> list[Count]:
    """Returns the counts that are kept."""
    return [Count(**row) for row in json.loads(COUNTS.read_text())["launches"]]


def measured(numbered: list[tuple[int, Recorded]], workers: int) -> list[Count]:
    """Compiles and counts these launches."""
    wanted = [compilation(x.launch, TARGET) for _, x in numbered]
    results = dict(compile_all({job.key: (job.key, job) for job in wanted}, workers))
    return [count(number, x, results[job.key]) for (number, x), job in zip(numbered, wanted, strict=True)]


def grown(kept: list[Count], now: list[Count]) -> list[str]:
    """Returns a line for each count in `now` that is more than in `kept`; a launch that is not kept has grown, too."""
    before = {x.key: x for x in kept}
    lines = []
    for new in now:
        name = f"{new.op}: {new.call}, {new.kernel} (launch {new.number})"
        if new.key not in before:
            lines.append(f"{name}: was not counted before")
            continue
        old = before[new.key]
        for what in ("warp_instructions", "bytes", "registers", "spill_bytes", "float64"):
            if getattr(new, what) > getattr(old, what) * (1 + TOLERANCE):
                lines.append(f"{name}: {what} {getattr(old, what):,.0f} -> {getattr(new, what):,.0f}")
        if new.resident_warps < old.resident_warps:
            lines.append(f"{name}: resident_warps {old.resident_warps} -> {new.resident_warps}")
    return lines


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Warp-instructions and bytes per token of the calls that models make most, in code compiled for sm_90.

    All are counted and kept in results/counts.json; `--check mix state_pass` compiles these kernels again, and ends
    with status 1 where a count has grown by more than a twentieth.
    """

    check: tuple[str, ...] = ()
    """Kernels to compare with what is kept; nothing is kept then."""
    workers: int = CORES
    """Compiling processes."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        """Counts and prints; returns the exit code."""
        numbered = list(counted_launches())
        if self.check:
            names = {x.launch.kernel.__name__ for _, x in numbered}
            if unknown := sorted(set(self.check) - names):
                raise ValueError(f"no kernel {unknown[0]!r} is counted; there are {', '.join(sorted(names))}")
            chosen = [x for x in numbered if x[1].launch.kernel.__name__ in self.check]
            lines = grown(read(), measured(chosen, self.workers))
            print("\n".join(lines) or f"{', '.join(self.check)}: no more than is kept in {COUNTS}")
            return 1 if lines else 0
        counts = measured(numbered, self.workers)
        about = json.dumps({"target": TARGET, "triton": triton.__version__, "tokens": BATCH * SEQLEN})
        rows = ",\n  ".join(json.dumps(x._asdict()) for x in counts)
        COUNTS.write_text(f'{about[:-1]}, "launches": [\n  {rows}\n]}}\n')
        print(f"{_table(counts)}\nkept in {COUNTS}")
        return 0


def _table(counts: list[Count]) -> str:
    """Returns a table with the sums of each call."""
    rows: list[list[object]] = [
        ["call", "kernel", "warp-instr./token", "bytes/token", "registers", "spills", "warps", "in float64"]
    ]
    for op, call in dict.fromkeys((x.op, x.call) for x in counts):
        own = [x for x in counts if (x.op, x.call) == (op, call)]
        for x in own:
            numbers = f"{x.warp_instructions:,.0f}", f"{x.bytes:,.0f}", x.registers, x.spill_bytes, x.resident_warps
            rows.append([f"{op}: {call}", x.kernel, *numbers, x.float64])
        sums = f"{sum(x.warp_instructions for x in own):,.0f}", f"{sum(x.bytes for x in own):,.0f}"
        rows.append([f"{op}: {call}", "all", *sums, "", "", "", ""])
    return columns(rows, (0, 1))
