"""Launches Triton kernels; all launches go through this module.

Launches can be recorded instead of run. A record has the exact signatures and constants of the launches, so that every
configuration can be compiled ahead of time for hardware that this machine does not have.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One launch of a kernel: the kernel, its grid and its arguments."""

    kernel: Any
    """A function decorated with `triton.jit`."""
    grid: tuple[int, ...]
    arguments: tuple
    """Tensors, integers, floats or None, in the order of the kernel's parameters."""
    constants: dict[str, Any]
    """What the kernel knows when it is compiled, by name, and what else the compiler is told."""
    num_warps: int
    num_stages: int


# Not a context variable: PyTorch runs backward passes on GPUs in a thread of its own.
_recorder: list[Launch] | None = None
_running = True


@contextlib.contextmanager
def record_launches(run: bool = False) -> Iterator[list[Launch]]:
    """Within this block launches are noted in the returned list; without `run` nothing else happens, and outputs stay
    unwritten."""
    global _recorder, _running
    before = _recorder, _running
    _recorder, _running = [], run
    try:
        yield _recorder
    finally:
        _recorder, _running = before


def recording() -> bool:
    """Returns whether launches are noted here."""
    return _recorder is not None


class ForcedConfiguration:
    """`with force_configuration(config): ...` makes an op's kernels use `config`, which is then its `value`.

    For the whole process, as PyTorch runs backward passes on GPUs in a thread of its own.
    """

    value: Any = None

    @contextlib.contextmanager
    def __call__(self, config: Any) -> Iterator[None]:
        before, self.value = self.value, config
        try:
            yield
        finally:
            self.value = before


def rows_in_place(x: torch.Tensor) -> torch.Tensor:
    """Rows that kernels can read as they lie: any strides but the last, whose numbers stand side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def blocks_in_place(x: torch.Tensor, kept: int) -> torch.Tensor:
    """Blocks of the last `kept` dimensions that kernels can read as they lie: any strides before these."""
    return x if x[(0,) * (x.dim() - kept)].is_contiguous() else x.contiguous()


class Constants:
    """What a kernel knows when it is compiled, by name: the value of its parameter `C: tl.constexpr`, of which it and
    the functions that it hands C to read C.TILE and so on."""

    def __init__(self, compiled: bool, items: tuple[tuple[str, Any], ...]):
        self._items = items
        for name, value in items:
            setattr(self, name, _constexpr(value) if compiled else value)

    def __repr__(self) -> str:
        return "_".join(f"{name}_{value}" for name, value in self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)


def _constexpr(value: Any) -> Any:
    from triton.language import constexpr

    return constexpr(value)


_constants = functools.cache(Constants)


def bound(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name that a kernel is called with: constants that are no parameters of its own go into C."""
    if "C" not in kernel.arg_names:
        return constants
    shared = {name for name in constants if name.isupper() and name not in kernel.arg_names}
    items = tuple((name, value) for name, value in constants.items() if name in shared)
    others = {name: value for name, value in constants.items() if name not in shared}
    return {**others, "C": _constants(not hasattr(kernel, "rewrite"), items)}


def launch(kernel, grid: tuple[int, ...], *arguments, num_warps: int, num_stages: int = 2, **constants) -> None:
    """Run `kernel` on `grid` (nothing if the grid is empty), on the device of the first tensor."""
    if 0 in grid:
        return
    if _recorder is not None:
        _recorder.append(Launch(kernel, grid, arguments, constants, num_warps, num_stages))
    if not _running:
        return
    num_stages = stages_on(num_stages, hip=bool(torch.version.hip))
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    num_warps, constants = safe_on(num_warps, constants, device.type == "cuda" and is_blackwell(device.index))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        constants = constants_on(constants, hip=bool(torch.version.hip))
        kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages, **bound(kernel, constants))


def constants_on(constants: dict[str, Any], hip: bool) -> dict[str, Any]:
    """Returns the constants that the compiler of the platform takes. "maxnreg", the registers of a thread, is NVIDIA's:
    without it the assembler at times spills a few of them to fit more programs side by side."""
    return {name: value for name, value in constants.items() if name != "maxnreg"} if hip else constants


def safe_on(num_warps: int, constants: dict[str, Any], blackwell: bool) -> tuple[int, dict[str, Any]]:
    """Warps and constants with which a kernel is right on a GPU.

    Triton before 3.8 leaves out barriers around Blackwell's tensor memory, so that products in loops (the kernels with
    a PRECISION) give other numbers at each run (triton-lang/triton issue 9871, fla-org/flash-linear-attention issues
    945 and 1228). Tensor memory takes four warps: with two, products go through registers as on older GPUs.
    """
    if not blackwell or "PRECISION" not in constants or blackwell_is_right():
        return num_warps, constants
    return min(num_warps, 2), {name: value for name, value in constants.items() if name != "maxnreg"}


@functools.cache
def is_blackwell(device: int | None) -> bool:
    """Returns whether this GPU has tensor memory: NVIDIA's compute capability 10 or 11."""
    return not torch.version.hip and torch.cuda.get_device_capability(device)[0] in (10, 11)


@functools.cache
def blackwell_is_right() -> bool:
    """Returns whether the installed Triton has the barriers that Blackwell's tensor memory needs."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)


def stages_on(num_stages: int, hip: bool) -> int:
    """Stages of software pipelining: none on AMD, whose 64 kB of shared memory do not hold a second tile."""
    return 1 if hip else num_stages


def dot_precision(dtype: torch.dtype) -> str:
    """Returns the precision in which kernels multiply float32 tiles where their inputs have this dtype.

    tf32x3 keeps float32's accuracy on NVIDIA's tensor cores, where exact float32 products would take scalar
    instructions; AMD's matrix cores multiply float32 as it is. For half precision tf32 is exact enough.
    """
    if torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1":
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
