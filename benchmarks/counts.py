"""`counts`: what kernels cost, counted in compiled code."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from matmix.benchmarks.calls import BATCH, SEQLEN, Call, calls
from matmix.benchmarks.compiling import CORES, Resources, compilation, compile_all
from matmix.benchmarks.report import RESULTS, columns
from matmix.benchmarks.resources import launches
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
    "a layer of Mamba-1,",
    "a layer with a matrix memory,",
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


WALKS = "s6_forward", "s6_gradients", "memory_forward_pass", "memory_backward_pass"
"""Kernels whose programs go along whole rows."""

LOOPS: dict[str, Callable[[dict[str, Any]], tuple[float, ...]]] = {
    # One program of all fills the triangle.
    "decay_sums": lambda _: (0,),
    "mix": _scan_loops,
    "pair_gradients": lambda names: (names["HEADS"],),
    # The code of readers and writers stands in one kernel, and a program runs one of them.
    "vector_gradients": lambda names: (names["HEADS"] / 2, 1),
    "state_pass": lambda names: (math.ceil(names["seqlen"] / names["TILE"]) / (2 if names["TWO"] else 1),),
    "_convolve": lambda names: (names["SPAN"] / names["ROWS"],),
    "_conv_gradients": lambda names: (names["walk"], (names["SPAN"] + names["WIDTH"] - 1) / names["ROWS"]),
    # The code has four loops over the sums of programs, of which a program runs one; those of the norm are the longest.
    "add_programs": lambda names: (math.ceil(names["norm_programs"] / names["PROGRAMS"]) / 4,),
    "cayley_pass": lambda names: (names["ORDER"] / 2,),
    "polish_pass": lambda names: (names["COUNT"],),
    # Groups of a chunk, and the tokens of a group.
    "gradients_pass": lambda names: (_chunk(names)[0] / names["GROUP"], names["GROUP"]),
    "_statistics": lambda names: (math.ceil(names["group"] / names["COLUMNS"]),),
    **dict.fromkeys(WALKS, lambda names: (math.ceil(names["seqlen"] / names["CHUNK"]),)),
    **dict.fromkeys(("_gradients", "step_gradients"), lambda names: (names["walk"],)),
    **dict.fromkeys(("products_pass", "outputs_pass", "collect_pass", "prefix_pass", "suffix_pass"), _chunk),
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


def counted_calls(dtype: torch.dtype = torch.bfloat16) -> Iterator[Call]:
    mine = [call for call in calls() if call.dtype == dtype]
    yield from (call for title in COUNTED for call in mine if f"{call.title},".startswith(title))


def count(call: Call, number: int, launch: Launch, kernel: Resources) -> Count:
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    loops = LOOPS.get(kernel.kernel, lambda _: ())(arguments)
    issued = sum(n * math.prod(loops[:depth]) for depth, n in enumerate(kernel.instructions))
    tokens = BATCH * SEQLEN
    issued *= launch.num_warps * math.prod(launch.grid) / tokens
    return Count(
        call.op, call.title, number, kernel.kernel, round(issued, 1), round(moved_bytes(launch) / tokens, 1),
        kernel.registers, kernel.spill_bytes, resident_warps(kernel), kernel.float64,
    )  # fmt: skip


def resident_warps(kernel: Resources) -> int:
    """Returns the warps that one multiprocessor of sm_90 can hold at the same time, by registers and shared memory.

    CUDA C++ programming guide, compute capability 9.0: 65,536 registers, given out in eights per thread; 228 KB of
    shared memory, of which each block takes 1 KB more than it asks for; 64 warps in at most 32 blocks.
    """
    registers = 65_536 // (-(-kernel.registers // 8) * 8 * 32 * kernel.num_warps)
    shared = 228 * 1024 // (kernel.shared_bytes + 1024)
    return min(registers, shared, 32, 64 // kernel.num_warps) * kernel.num_warps


def moved_bytes(launch: Launch) -> int:
    """Returns the bytes of the launch's tensors, each once."""
    tensors = {}
    for x in launch.arguments:
        if isinstance(x, torch.Tensor):
            tensors[x.untyped_storage()._cdata, x.storage_offset(), x.shape] = x.numel() * x.element_size()
    return sum(tensors.values())


def read() -> list[Count]:
    return [Count(**row) for row in json.loads(COUNTS.read_text())["launches"]]


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
        calls = counted_calls()
        numbered = [(call, number, x) for call in calls for number, (_, x) in enumerate(launches([call]))]
        names = {launch.kernel.__name__ for *_, launch in numbered}
        if unknown := sorted(set(self.check) - names):
            raise ValueError(f"no kernel {unknown[0]!r} is counted; there are {', '.join(sorted(names))}")
        chosen = [x for x in numbered if x[-1].kernel.__name__ in (self.check or names)]
        jobs = [compilation(launch, TARGET) for *_, launch in chosen]
        results = dict(compile_all({job.key: (job.key, job) for job in jobs}, self.workers))
        counts = [count(*x, results[job.key]) for x, job in zip(chosen, jobs, strict=True)]
        if self.check:
            lines = grown(read(), counts)
            print("\n".join(lines) or f"{', '.join(self.check)}: no more than is kept in {COUNTS}")
            return 1 if lines else 0
        about = json.dumps({"target": TARGET, "triton": triton.__version__, "tokens": BATCH * SEQLEN})
        rows = ",\n  ".join(json.dumps(x._asdict()) for x in counts)
        COUNTS.write_text(f'{about[:-1]}, "launches": [\n  {rows}\n]}}\n')
        print(f"{_table(counts)}\nkept in {COUNTS}")
        return 0


def _table(counts: list[Count]) -> str:
    head = "call", "kernel", "warp-instr./token", "bytes/token", "registers", "spills", "warps", "in float64"
    rows: list[tuple] = [head]
    for (op, title), group in itertools.groupby(counts, key=lambda x: (x.op, x.call)):
        own = list(group)
        for x in own:
            numbers = f"{x.warp_instructions:,.0f}", f"{x.bytes:,.0f}", x.registers, x.spill_bytes, x.resident_warps
            rows.append((f"{op}: {title}", x.kernel, *numbers, x.float64))
        sums = f"{sum(x.warp_instructions for x in own):,.0f}", f"{sum(x.bytes for x in own):,.0f}"
        rows.append((f"{op}: {title}", "all", *sums, "", "", "", ""))
    return columns(rows, (0, 1))
