"""What the kernels take of a GPU: `python -P -m matmix.benchmarks resources`.

Compiles every launch of every op, for GPUs that need not be there, and prints registers, spills and shared memory.
Ends with status 1 if anything does not compile or takes more memory than the hardware has.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from matmix.benchmarks.compiling import HARDWARE, Compilation, Resources, compilation, compiled, problem
from matmix.benchmarks.kernels.calls import Call, calls
from matmix.kernels.backend import TRITON_FORMS
from matmix.kernels.launching import Launch, record_launches

Beside, Found = TypeVar("Beside"), TypeVar("Found")

NOT_ON_AMD = frozenset({"cayley_pass"})
"""Kernels that its compiler refuses, and that are not launched there (NVIDIA_ONLY in matmix.kernels.mru.op)."""


class Recorded(NamedTuple):
    """A launch and what it was recorded from."""

    call: Call
    launch: Launch
    calls: int
    """Launches that its call makes; recorded again under other configurations, they follow."""


def launches(scope: str = "standard", only: Iterable[str] = ()) -> list[Recorded]:
    """All launches of the ops' kernels, recorded without running them.

    Args:
        scope: "full": all calls as they are, and main calls under every configuration. (Others are not: forced upon
            widths that it is not for, a configuration spills, which no real call does.) "standard": without rare
            calls. "sample": of "standard" one launch of each kernel and dtype.
        only: keep calls whose op, title and dtype, on one line, contain all of these texts.
    """
    found: list[Recorded] = []
    for call in calls():
        if call.rare and scope != "full":
            continue
        if not all(text in f"{call.op}: {call.title}, {call.dtype_name}" for text in only):
            continue
        module = importlib.import_module(TRITON_FORMS[call.op])
        forced = [None, *(module.configurations() if call.main else ())]
        for configuration in forced:
            force = contextlib.nullcontext() if configuration is None else module.force_configuration(configuration)
            with force, record_launches() as recorded:
                call.run(module)
            found += [Recorded(call, launch, len(recorded)) for launch in recorded]
    if scope == "sample":
        found = list({(x.launch.kernel.__name__, x.call.dtype): x for x in reversed(found)}.values())[::-1]
    return found


def compilations(found: Iterable[Recorded], targets: Iterable[str]) -> dict[str, tuple[Call, Compilation]]:
    """What is to be compiled, each only once, by its key."""
    jobs: dict[str, tuple[Call, Compilation]] = {}
    for target in targets:
        for call, launch, _ in found:
            if target.startswith("gfx") and launch.kernel.__name__ in NOT_ON_AMD:
                continue
            job = compilation(launch, target)
            jobs.setdefault(job.key, (call, job))
    return jobs


def compile_all(
    jobs: dict[str, tuple[Beside, Compilation]], workers: int, how: Callable[[Compilation], Found] = compiled
) -> Iterator[tuple[Beside, Found]]:
    """Compile in `workers` processes, with a progress bar; results (what `how` returns) come as they are done, with
    what stands beside the compilation."""
    context = get_context("forkserver")  # the compiler is not safe to fork once it has threads
    context.set_forkserver_preload(["matmix.benchmarks.compiling"])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(how, job): call for call, job in jobs.values()}
        for done in tqdm(as_completed(waiting), total=len(waiting), unit="kernel", mininterval=1.0):
            yield waiting[done], done.result()


def constants_text(constants: dict) -> str:
    """Constexprs on one line: true flags by name, false and absent ones left out."""
    kept = {name: value for name, value in constants.items() if value is not None and value is not False}
    return " ".join(name if value is True else f"{name}={value}" for name, value in kept.items())


def table(rows: list[tuple[Call, Resources]]) -> str:
    """One line per compiled kernel, sorted."""
    titles = ["kernel", "dtype", "target", "warps", "stages", "registers", "spills"]
    titles += ["shared", "limit", "seconds", "constants"]
    lines = [titles]
    for call, found in sorted(rows, key=_order):
        numbers = (found.num_warps, found.num_stages, found.registers, found.spill_bytes, found.shared_bytes)
        last = constants_text(found.constants) + ("  <- see below" if problem(found) else "")
        limit, seconds = str(HARDWARE[found.target].shared_memory), f"{found.compile_seconds:.1f}"
        lines.append([found.kernel, call.dtype_name, found.target, *map(str, numbers), limit, seconds, last])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = (0, 1, 2, len(titles) - 1)
    return "\n".join(
        "  ".join(cell.ljust(widths[i]) if i in text else cell.rjust(widths[i]) for i, cell in enumerate(line)).rstrip()
        for line in lines
    )


def _order(row: tuple[Call, Resources]) -> tuple:
    call, found = row
    return (
        found.kernel,
        call.dtype_name,
        constants_text(found.constants),
        found.num_warps,
        list(HARDWARE).index(found.target),
    )


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -P -m matmix.benchmarks resources", description=__doc__)
    parser.add_argument("--target", action="append", choices=list(HARDWARE), help="may be repeated; all if not given")
    parser.add_argument("--only", action="append", default=[], help="calls whose op, title or dtype contains this text")
    parser.add_argument(
        "--scope",
        choices=["sample", "standard", "full"],
        default="standard",
        help="one launch of each kernel and dtype; all calls that show something new; or truly all",
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="compiling processes")
    parser.add_argument("--json", type=Path, default=None, help="also write the results into this file")
    options = parser.parse_args(arguments)
    jobs = compilations(launches(options.scope, options.only), options.target or list(HARDWARE))
    rows = list(compile_all(jobs, options.workers))
    print(table(rows))
    if options.json:
        records = [{"op": call.op, "call": call.title, "dtype": call.dtype_name, **r._asdict()} for call, r in rows]
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    failed = [found for _, found in rows if problem(found)]
    for found in failed:
        print(f"{found.kernel} on {found.target}, {constants_text(found.constants)}: {problem(found)}", file=sys.stderr)
    print(f"{len(rows)} kernels compiled, {len(failed)} of them with problems")
    return 1 if failed else 0
