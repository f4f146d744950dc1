"""`resources`: what the kernels take of a GPU, compiled ahead of time."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from tqdm import tqdm
from tyro.conf import UseAppendAction

from matmix.benchmarks.calls import Call, calls, form_of
from matmix.benchmarks.compiling import HARDWARE, Compilation, Resources, compilation, compiled, problem
from matmix.benchmarks.report import columns
from matmix.kernels.launching import Launch, record_launches

Beside, Result = TypeVar("Beside"), TypeVar("Result")
CORES = len(os.sched_getaffinity(0))

NOT_ON_AMD = frozenset({"cayley_pass"})
"""Kernels that its compiler refuses, and that are not launched there (NVIDIA_ONLY in matmix.kernels.mru.op)."""


class Recorded(NamedTuple):
    """A launch and the call it was recorded from."""

    call: Call
    launch: Launch
    calls: int
    """Launches that its call makes; recorded again under other configurations, they follow."""


def launches(scope: str = "standard", only: Iterable[str] = ()) -> list[Recorded]:
    """Records all launches of the ops' kernels without running them.

    Args:
        scope: "full": all calls as they are, and main calls under every configuration. (Others are not: forced upon
            widths that it is not for, a configuration spills, which no real call does.) "standard": without rare
            calls. "sample": of "standard" one launch of each kernel and dtype.
        only: keep calls whose op, title and dtype, on one line, contain all of these texts.
    """
    recorded: list[Recorded] = []
    for call in calls():
        if call.rare and scope != "full":
            continue
        if not all(text in f"{call.op}: {call.title}, {call.dtype_name}" for text in only):
            continue
        module = form_of(call)
        for configuration in (None, *(module.configurations() if call.main else ())):
            force = contextlib.nullcontext() if configuration is None else module.force_configuration(configuration)
            with force, record_launches() as own:
                call.run(module)
            recorded += [Recorded(call, launch, len(own)) for launch in own]
    if scope == "sample":
        recorded = list({(x.launch.kernel.__name__, x.call.dtype): x for x in reversed(recorded)}.values())[::-1]
    return recorded


def compile_all(
    jobs: dict[str, tuple[Beside, Compilation]],
    workers: int = CORES,
    how: Callable[[Compilation], Result] = compiled,
) -> Iterator[tuple[Beside, Result]]:
    """Compiles in `workers` processes, with a progress bar; yields results (what `how` returns) as they are done, with
    what stands beside the compilation."""
    context = get_context("forkserver")  # the compiler is not safe to fork once it has threads
    context.set_forkserver_preload([importlib.import_module("matmix.benchmarks.compiling").__name__])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(how, job): beside for beside, job in jobs.values()}
        for done in tqdm(as_completed(waiting), total=len(waiting), unit="kernel", mininterval=1.0):
            yield waiting[done], done.result()


def constants_text(constants: dict) -> str:
    """Returns constexprs on one line: true flags by name, false and absent ones left out."""
    kept = {name: value for name, value in constants.items() if value is not None and value is not False}
    return " ".join(name if value is True else f"{name}={value}" for name, value in kept.items())


@dataclass(frozen=True, kw_only=True)
class ResourcesOfKernels:
    """Registers, spills and shared memory of every kernel, compiled for GPUs that need not be there.

    Ends with status 1 if anything does not compile or takes more memory than the hardware has.
    """

    target: UseAppendAction[tuple[Literal[tuple(HARDWARE)], ...]] = ()
    """A GPU; may be repeated; all if not given."""
    only: UseAppendAction[tuple[str, ...]] = ()
    """Calls whose op, title or dtype contains this text; may be repeated."""
    scope: Literal["sample", "standard", "full"] = "standard"
    """One launch of each kernel and dtype; all calls that show something new; or truly all."""
    workers: int = field(default=CORES)
    """Compiling processes."""
    json: Path | None = None
    """Also write the results into this file."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        """Compiles and prints; returns the exit code."""
        jobs: dict[str, tuple[Call, Compilation]] = {}
        for call, launch, _ in launches(self.scope, self.only):
            for target in self.target or HARDWARE:
                if not (target.startswith("gfx") and launch.kernel.__name__ in NOT_ON_AMD):
                    job = compilation(launch, target)
                    jobs.setdefault(job.key, (call, job))
        results = sorted(compile_all(jobs, self.workers), key=_order)
        print(_table(results))
        if self.json:
            records = [{"op": c.op, "call": c.title, "dtype": c.dtype_name, **r._asdict()} for c, r in results]
            self.json.write_text(json.dumps(records, indent=1) + "\n")
        failed = [kernel for _, kernel in results if problem(kernel)]
        for kernel in failed:
            about = f"{kernel.kernel} on {kernel.target}, {constants_text(kernel.constants)}"
            print(f"{about}: {problem(kernel)}", file=sys.stderr)
        print(f"{len(results)} kernels compiled, {len(failed)} of them with problems")
        return 1 if failed else 0


def _table(results: list[tuple[Call, Resources]]) -> str:
    rows: list[list[object]] = [
        [
            "kernel",
            "dtype",
            "target",
            "warps",
            "stages",
            "registers",
            "spills",
            "shared",
            "limit",
            "seconds",
            "constants",
        ]
    ]
    for call, kernel in results:
        sizes = (kernel.num_warps, kernel.num_stages, kernel.registers, kernel.spill_bytes, kernel.shared_bytes)
        limit, seconds = HARDWARE[kernel.target].shared_memory, f"{kernel.compile_seconds:.1f}"
        last = constants_text(kernel.constants) + ("  <- see below" if problem(kernel) else "")
        rows.append([kernel.kernel, call.dtype_name, kernel.target, *sizes, limit, seconds, last])
    return columns(rows, (0, 1, 2, -1))


def _order(row: tuple[Call, Resources]) -> tuple:
    call, kernel = row
    constants = constants_text(kernel.constants)
    return kernel.kernel, call.dtype_name, constants, kernel.num_warps, list(HARDWARE).index(kernel.target)
