"""Compiles recorded kernel launches ahead of time, for GPUs that need not be there, and counts their instructions.

Triton itself binds and specialises the arguments (pointer types, multiples of 16, ones folded to constants, None), so
that what is compiled here is what the launch would compile on that GPU; only the driver, which would ask the GPU what
it is, is replaced. Processes that use this module must not have TRITON_INTERPRET set.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from tqdm import tqdm
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.runtime.jit import compute_cache_key

from matmix.kernels.launching import Launch, bound, constants_on, safe_on, stages_on

Beside, Result = TypeVar("Beside"), TypeVar("Result")
CORES = len(os.sched_getaffinity(0))


class Hardware(NamedTuple):
    """A GPU architecture to compile for."""

    target: GPUTarget
    shared_memory: int
    """Bytes that one thread block (work-group) may use."""
    tensor_memory: int = 0
    """Columns of Blackwell's tensor memory that one thread block may use."""


# CUDA C++ programming guide, "Technical specifications per compute capability": at most 163 KB of shared memory per
# thread block for 8.0 and 227 KB for 9.0 and 10.0. PTX ISA, "Tensor memory addressing": 512 columns.
# AMD Instinct MI300 (CDNA3) ISA, "Local data share": 64 kB per work-group.
HARDWARE = {
    "sm_80": Hardware(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Hardware(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Hardware(GPUTarget("cuda", 100, 32), 227 * 1024, tensor_memory=512),
    "gfx942": Hardware(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


class Resources(NamedTuple):
    """The resources that one compiled kernel uses."""

    kernel: str
    target: str
    """A key of `HARDWARE`."""
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    registers: int = 0
    """32-bit registers per thread; on gfx942 vector and accumulation registers together."""
    spill_bytes: int = 0
    """Bytes per thread of register spills, stores plus loads; on gfx942 vector registers' stores only."""
    shared_bytes: int = 0
    tensor_memory: int = 0
    compile_seconds: float = 0.0
    """Time that the compiler took when it last ran: results come from Triton's cache if they are there."""
    instructions: tuple[int, ...] = ()
    """By the depth of loops around them; empty for other than NVIDIA's GPUs."""
    float64: int = 0
    """Instructions that compute with doubles, on NVIDIA's GPUs."""
    error: str = ""
    """Why it does not compile; the numbers are then 0."""


@dataclass(frozen=True)
class Pointer:
    """The properties of a tensor that the compiler needs; unlike the tensor it is cheap to send to another process."""

    dtype: torch.dtype
    misalignment: int
    """Address modulo 16 bytes."""
    storage_bytes: int

    def data_ptr(self) -> int:
        return self.misalignment

    def ptr_range(self) -> int:
        return self.storage_bytes


class Compilation(NamedTuple):
    """A launch for one architecture, as plain data."""

    module: str
    kernel: str
    arguments: tuple
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    target: str
    key: str
    """Equal for two launches of a kernel exactly if Triton would compile it once for both."""


def compilation(launch: Launch, target: str) -> Compilation:
    """Returns the job that Triton would compile for this launch on `target`, a key of `HARDWARE`."""
    if not isinstance(launch.kernel, JITFunction):
        raise TypeError(f"{launch.kernel} cannot be compiled; import its module without TRITON_INTERPRET")
    amd = target.startswith("gfx")
    constants = constants_on(launch.constants, hip=amd)
    if amd:  # see launching.dot_precision
        constants = {name: "ieee" if value in ("tf32", "tf32x3") else value for name, value in constants.items()}
    num_stages = stages_on(launch.num_stages, hip=amd)
    num_warps, constants = safe_on(launch.num_warps, constants, target == "sm_100")
    arguments = tuple(_pointer(x) if isinstance(x, torch.Tensor) else x for x in launch.arguments)
    with _pretend(target):
        *_, binder = launch.kernel.device_caches[HARDWARE[target].target]
        options = bound(launch.kernel, constants) | {"num_warps": num_warps, "num_stages": num_stages}
        _, *specialised = binder(*arguments, **options)
        key = compute_cache_key({}, *specialised)
    module, name = launch.kernel.fn.__module__, launch.kernel.fn.__qualname__
    sizes = num_warps, num_stages, target
    return Compilation(module, name, arguments, constants, *sizes, f"{module}.{name}-{target}-{key}")


def _pointer(tensor: torch.Tensor) -> Pointer:
    # Allocators of GPU memory align storages by 256 bytes and more.
    misalignment = tensor.storage_offset() * tensor.element_size() % 16
    return Pointer(tensor.dtype, misalignment, tensor.untyped_storage().size())


def compiled(job: Compilation) -> Resources:
    """Compiles a job, or finds it in Triton's cache on disk; a compiler's error is returned and not raised."""
    kernel = Resources(job.kernel, job.target, job.constants, job.num_warps, job.num_stages)
    try:
        binary = _compile(job, noting=True)
    except Exception as error:  # whatever the compiler raises is a finding about this kernel
        return kernel._replace(error=f"{type(error).__name__}: {error}")
    report, shared = binary.metadata.report, binary.metadata.shared
    named = operations(disassemble(binary.asm["cubin"])) if "cubin" in binary.asm else []
    return kernel._replace(
        registers=report["registers"], spill_bytes=report["spill_bytes"], compile_seconds=report["seconds"],
        shared_bytes=shared, tensor_memory=getattr(binary.metadata, "tmem_size", None) or 0,
        instructions=by_loop_depth(named) if named else (), float64=in_float64(named),
    )  # fmt: skip


def warm(job: Compilation) -> None:
    """Compiles into Triton's ordinary cache, where processes on a machine with this GPU look for it."""
    with contextlib.suppress(Exception):  # the launch itself will meet it again
        _compile(job, noting=False)


def _compile(job: Compilation, noting: bool) -> Any:
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    with _pretend(job.target, noting):
        return kernel.run(*job.arguments, grid=None, warmup=True, **options, **bound(kernel, job.constants))


def compile_all(
    jobs: dict[str, tuple[Beside, Compilation]], workers: int = CORES, how: Callable[[Compilation], Result] = compiled
) -> Iterator[tuple[Beside, Result]]:
    """Compiles in `workers` processes, with a progress bar; yields results (what `how` returns) as they are done, with
    what stands beside the compilation."""
    context = get_context("forkserver")  # the compiler is not safe to fork once it has threads
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(how, job): beside for beside, job in jobs.values()}
        for done in tqdm(as_completed(waiting), total=len(waiting), unit="kernel", mininterval=1.0):
            yield waiting[done], done.result()


def problem(kernel: Resources) -> str:
    """Returns the reason why this kernel cannot be used; empty if there is none. Spills only cost time."""
    hardware = HARDWARE[kernel.target]
    if kernel.error:
        return kernel.error
    if kernel.shared_bytes > hardware.shared_memory:
        return f"takes {kernel.shared_bytes:,} bytes of shared memory; {hardware.shared_memory:,} are there"
    if kernel.tensor_memory > hardware.tensor_memory:
        return f"takes {kernel.tensor_memory} columns of tensor memory; {hardware.tensor_memory} are there"
    return ""


@contextlib.contextmanager
def _pretend(target: str, noting: bool = True) -> Iterator[None]:
    """Lets Triton compile for `target` in this block and, if `noting`, note what the assembler says in the kernel's
    metadata."""
    before, gpu = driver._active, HARDWARE[target].target
    # Kernels compiled in this process are kept by device: each target is one.
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: gpu, get_current_device=lambda: gpu, get_current_stream=lambda device: 0
        )
    )
    with knobs.cache.scope(), knobs.runtime.scope():
        if noting:
            # Entries of the ordinary cache, for a GPU that is there, lack the notes.
            knobs.cache.dir = os.path.join(knobs.cache.dir, "resources")
            knobs.runtime.add_stages_inspection_hook = _note_resources
        try:
            yield
        finally:
            driver._active = before


def _note_resources(backend, stages: dict, options, language, capability) -> None:
    """Lets the last stage of a compilation write registers, spills and time into the metadata."""
    start, assemble = time.perf_counter(), stages[backend.binary_ext]

    def noted(source, metadata: dict):
        with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
            knobs.nvidia.dump_ptxas_log = True
            binary = assemble(source, metadata)
        report = ptxas_report(log.getvalue()) if backend.binary_ext == "cubin" else amdgcn_report(source)
        metadata["report"] = {**report, "seconds": time.perf_counter() - start}
        return binary

    stages[backend.binary_ext] = noted


def ptxas_report(log: str) -> dict[str, int]:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not spills:
        raise ValueError(f"ptxas did not say what the kernel uses:\n{log}")
    return {"registers": max(registers), "spill_bytes": sum(int(n) for pair in spills for n in pair)}


def amdgcn_report(assembly: str) -> dict[str, int]:
    """Reads registers and spills from the code object metadata at the end of AMD assembly.

    https://llvm.org/docs/AMDGPUUsage.html#code-object-v3-metadata: .vgpr_count includes the accumulation registers
    where, as on gfx942, both are one file; spill counts are stores of one 32-bit register each.
    """
    counts = {name: int(n) for name, n in re.findall(r"^\s*(?:- )?\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    return {"registers": counts["vgpr_count"], "spill_bytes": 4 * counts["vgpr_spill_count"]}


# -- Instructions ------------------------------------------------------------------------------------------------------
# A GPU issues at most four instructions per cycle and multiprocessor, each for the 32 threads of a warp; kernels that
# are not bound by memory cannot be faster than that. What a launch issues is the sum over its instructions of how often
# each runs, times warps, times programs. Loops are found in the machine code; how often one runs its caller knows.

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
_LABEL = re.compile(r"^(\.L\S*):")
_DOUBLE = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)|MUFU\.\w+64|F2F\.\S*F64|I2F\.\S*F64|F2I\.\S*F64")
_TARGET = re.compile(r"`\(([^)]+)\)")


def disassemble(cubin: bytes) -> str:
    """Returns the SASS of a compiled kernel, by the disassembler that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done.stdout


def operations(sass: str) -> list[tuple[str, int]]:
    """Returns each instruction's name with its modifiers, as DFMA.RN, and the number of loops around it.

    A loop is what lies between a backward branch and its target; padding after the last instruction does not count, nor
    does the branch to itself behind it.
    """
    names: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in map(str.strip, sass.splitlines()):
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(names)
        elif instruction := _INSTRUCTION.search(line):
            name, operands = instruction.groups()
            if name == "NOP":
                continue
            if name.startswith("BRA") and (target := _TARGET.search(operands)):
                branches.append((len(names), target.group(1)))
            names.append(name)
    depth = [0] * len(names)
    for loop in {(labels[target], at) for at, target in branches if labels.get(target, at) < at}:
        for place in range(loop[0], loop[1] + 1):
            depth[place] += 1
    return list(zip(names, depth, strict=True))


def by_loop_depth(named: list[tuple[str, int]]) -> tuple[int, ...]:
    """Counts those of `operations` outside of any loop, inside one loop, inside two, ..."""
    depths = [depth for _, depth in named]
    return tuple(depths.count(level) for level in range(max(depths, default=0) + 1))


def in_float64(named: list[tuple[str, int]]) -> int:
    """Counts those of `operations` that compute with doubles, of which most GPUs do few at a time."""
    return sum(bool(_DOUBLE.match(name)) for name, _ in named)
