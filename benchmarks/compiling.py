"""Compiles recorded kernel launches ahead of time, for GPUs that this machine need not have.

Triton itself binds and specialises the arguments (pointer types, multiples of 16, ones folded to constants, None),
so that what is compiled here is what the launch would compile on that GPU; only the driver, which would ask the
GPU what it is, is replaced. Processes that use this module must not have TRITON_INTERPRET set.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.runtime.jit import compute_cache_key

from matmix.benchmarks.instructions import by_loop_depth, disassemble, in_float64, operations
from matmix.kernels.launching import Launch, constants_on, safe_on, stages_on


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
    registers: int
    """32-bit registers per thread; on gfx942 vector and accumulation registers together."""
    spill_bytes: int
    """Bytes per thread of register spills, stores plus loads; on gfx942 vector registers' stores only."""
    shared_bytes: int
    tensor_memory: int
    compile_seconds: float
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
    """What Triton would compile for this launch on `target`, a key of `HARDWARE`."""
    if not isinstance(launch.kernel, JITFunction):
        raise TypeError(f"{launch.kernel} cannot be compiled; import its module without TRITON_INTERPRET")
    constants = constants_on(launch.constants, hip=target.startswith("gfx"))
    if target.startswith("gfx"):  # see launching.dot_precision
        constants = {name: "ieee" if value in ("tf32", "tf32x3") else value for name, value in constants.items()}
    num_stages = stages_on(launch.num_stages, hip=target.startswith("gfx"))
    num_warps, constants = safe_on(launch.num_warps, constants, target == "sm_100")
    arguments = tuple(_pointer(x) if isinstance(x, torch.Tensor) else x for x in launch.arguments)
    with _pretend(target):
        hardware = HARDWARE[target]
        *_, binder = launch.kernel.device_caches[hardware.target]
        options = {"num_warps": num_warps, "num_stages": num_stages}
        _, specialization, options = binder(*arguments, **constants, **options)
        key = compute_cache_key({}, specialization, options)
    function = launch.kernel.fn
    return Compilation(
        function.__module__,
        function.__qualname__,
        arguments,
        constants,
        num_warps,
        num_stages,
        target,
        f"{function.__module__}.{function.__qualname__}-{target}-{key}",
    )


def _pointer(tensor: torch.Tensor) -> Pointer:
    # Allocators of GPU memory align storages by 256 bytes and more.
    misalignment = tensor.storage_offset() * tensor.element_size() % 16
    return Pointer(tensor.dtype, misalignment, tensor.untyped_storage().size())


def compiled(job: Compilation) -> Resources:
    """Compile, or find in Triton's cache on disk; a compiler's error is returned and not raised."""
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    about = (kernel.__name__, job.target, job.constants, job.num_warps, job.num_stages)
    with _pretend(job.target):
        try:
            found = kernel.run(
                *job.arguments,
                grid=None,
                warmup=True,
                num_warps=job.num_warps,
                num_stages=job.num_stages,
                **job.constants,
            )
        except Exception as error:  # whatever the compiler raises is a finding about this kernel
            return Resources(*about, 0, 0, 0, 0, 0.0, error=f"{type(error).__name__}: {error}")
    report = found.metadata.report
    named = operations(disassemble(found.asm["cubin"])) if "cubin" in found.asm else []
    return Resources(
        *about,
        report["registers"],
        report["spill_bytes"],
        found.metadata.shared,
        getattr(found.metadata, "tmem_size", None) or 0,
        report["seconds"],
        by_loop_depth(named) if named else (),
        in_float64(named),
    )


def warmed(job: Compilation) -> str:
    """Compile into Triton's ordinary cache, where processes on a machine with this GPU find it; returns the compiler's
    error, "" if there is none."""
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    with _pretend(job.target, noting=False):
        try:
            options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
            kernel.run(*job.arguments, grid=None, warmup=True, **options, **job.constants)
        except Exception as error:  # the launch itself will meet it again
            return f"{type(error).__name__}: {error}"
    return ""


def resident_warps(found: Resources) -> int:
    """Warps that one multiprocessor of sm_90 can hold at the same time, by registers and shared memory.

    CUDA C++ programming guide, compute capability 9.0: 65,536 registers, given out in eights per thread; 228 KB of
    shared memory, of which each block takes 1 KB more than it asks for; 64 warps in at most 32 blocks.
    """
    registers = 65_536 // (-(-found.registers // 8) * 8 * 32 * found.num_warps)
    shared = 228 * 1024 // (found.shared_bytes + 1024)
    return min(registers, shared, 32, 64 // found.num_warps) * found.num_warps


def problem(found: Resources) -> str:
    """The reason why this kernel cannot be used; empty if there is none. Spills only cost time."""
    hardware = HARDWARE[found.target]
    if found.error:
        return found.error
    if found.shared_bytes > hardware.shared_memory:
        return f"takes {found.shared_bytes:,} bytes of shared memory; {hardware.shared_memory:,} are there"
    if found.tensor_memory > hardware.tensor_memory:
        return f"takes {found.tensor_memory} columns of tensor memory; {hardware.tensor_memory} are there"
    return ""


class _AbsentGPU:
    """A stand-in for Triton's driver: answers its questions about the GPU when a kernel is compiled without a GPU."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target  # kernels compiled in this process are kept by device

    def get_current_stream(self, device) -> int:
        return 0


@contextlib.contextmanager
def _pretend(target: str, noting: bool = True) -> Iterator[None]:
    """Triton compiles for `target` in this block and, if `noting`, notes what the assembler says in the kernel's
    metadata."""
    before = driver._active
    driver.set_active(_AbsentGPU(HARDWARE[target].target))
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
    """Let the last stage of a compilation write registers, spills and time into the metadata."""
    start = time.perf_counter()
    assemble = stages[backend.binary_ext]

    def noted(source, metadata: dict):
        if backend.binary_ext == "cubin":
            with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
                knobs.nvidia.dump_ptxas_log = True
                binary = assemble(source, metadata)
            report = ptxas_report(log.getvalue())
        else:
            binary = assemble(source, metadata)
            report = amdgcn_report(source)
        metadata["report"] = {**report, "seconds": time.perf_counter() - start}
        return binary

    stages[backend.binary_ext] = noted


def ptxas_report(log: str) -> dict[str, int]:
    """Registers and spills from what `ptxas -v` prints."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not spills:
        raise ValueError(f"ptxas did not say what the kernel uses:\n{log}")
    return {"registers": max(registers), "spill_bytes": sum(int(n) for pair in spills for n in pair)}


def amdgcn_report(assembly: str) -> dict[str, int]:
    """Registers and spills from the code object metadata at the end of AMD assembly.

    https://llvm.org/docs/AMDGPUUsage.html#code-object-v3-metadata: .vgpr_count includes the accumulation registers
    where, as on gfx942, both are one file; spill counts are stores of one 32-bit register each.
    """
    counts = {name: int(n) for name, n in re.findall(r"^\s*(?:- )?\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    return {"registers": counts["vgpr_count"], "spill_bytes": 4 * counts["vgpr_spill_count"]}
