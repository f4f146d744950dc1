"""`resources`: what the kernels take of a GPU, compiled ahead of time."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import UseAppendAction

from matmix.benchmarks.calls import Call, calls, form_of
from matmix.benchmarks.compiling import CORES, HARDWARE, Compilation, Resources, compilation, compile_all, problem
from matmix.benchmarks.report import columns
from matmix.kernels.launching import Launch, record_launches

NOT_ON_AMD = frozenset({"cayley_pass"})
"""Kernels that its compiler refuses, and that are not launched there (NVIDIA_ONLY in matmix.kernels.mru.op)."""


def launches(wanted: Iterable[Call], configured: bool = False) -> Iterator[tuple[Call, Launch]]:
    """Records all launches of these calls without running them; of main calls, if `configured`, under every
    configuration as well. (Others are not: forced upon widths that it is not for, a configuration spills, which no real
    call does.)"""
    for call in wanted:
        module = form_of(call)
        for configuration in (None, *(module.configurations() if configured and call.main else ())):
            force = contextlib.nullcontext() if configuration is None else module.force_configuration(configuration)
            with force, record_launches() as recorded:
                call.run(module)
            yield from ((call, launch) for launch in recorded)


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
    """One launch of each kernel and dtype; all calls in bfloat16, and those that models make; or truly all."""
    workers: int = field(default=CORES)
    """Compiling processes."""
    json: Path | None = None
    """Also write the results into this file."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        jobs: dict[str, tuple[Call, Compilation]] = {}
        for call, launch in self.launches():
            for target in self.target or HARDWARE:
                if not (target.startswith("gfx") and launch.kernel.__name__ in NOT_ON_AMD):
                    job = compilation(launch, target)
                    jobs.setdefault(job.key, (call, job))
        results = sorted(compile_all(jobs, self.workers), key=_order)
        head = "kernel", "dtype", "target", "warps", "stages", "registers", "spills", "shared", "limit", "seconds"
        print(columns([(*head, "constants"), *(_row(*result) for result in results)], (0, 1, 2, -1)))
        if self.json:
            records = [{"op": c.op, "call": c.title, "dtype": c.dtype_name, **r._asdict()} for c, r in results]
            self.json.write_text(json.dumps(records, indent=1) + "\n")
        failed = [kernel for _, kernel in results if problem(kernel)]
        for kernel in failed:
            about = f"{kernel.kernel} on {kernel.target}, {constants_text(kernel)}"
            print(f"{about}: {problem(kernel)}", file=sys.stderr)
        print(f"{len(results)} kernels compiled, {len(failed)} of them with problems")
        return 1 if failed else 0

    def launches(self) -> Iterable[tuple[Call, Launch]]:
        """Returns the launches of the calls that are wanted."""
        wanted = [x for x in calls() if all(text in f"{x.op}: {x.title}, {x.dtype_name}" for text in self.only)]
        if self.scope == "sample":
            recorded = launches(wanted)
            return {(x.kernel.__name__, call.dtype): (call, x) for call, x in reversed(list(recorded))}.values()
        if self.scope == "standard":
            wanted = [call for call in wanted if call.main or call.dtype_name == "bfloat16"]
        return launches(wanted, configured=True)


def constants_text(kernel: Resources) -> str:
    """Returns constexprs on one line: true flags by name, false and absent ones left out."""
    kept = {name: value for name, value in kernel.constants.items() if value is not None and value is not False}
    return " ".join(name if value is True else f"{name}={value}" for name, value in kept.items())


def _row(call: Call, kernel: Resources) -> tuple:
    sizes = kernel.num_warps, kernel.num_stages, kernel.registers, kernel.spill_bytes, kernel.shared_bytes
    limit, seconds = HARDWARE[kernel.target].shared_memory, f"{kernel.compile_seconds:.1f}"
    last = constants_text(kernel) + ("  <- see below" if problem(kernel) else "")
    return kernel.kernel, call.dtype_name, kernel.target, *sizes, limit, seconds, last


def _order(row: tuple[Call, Resources]) -> tuple:
    call, kernel = row
    constants = constants_text(kernel)
    return kernel.kernel, call.dtype_name, constants, kernel.num_warps, list(HARDWARE).index(kernel.target)
