"""Counts the instructions of a compiled kernel: a measure of its speed for which no GPU need be there.

A GPU issues at most four instructions per cycle and multiprocessor, each for the 32 threads of a warp; kernels that are
not bound by memory cannot be faster than that. What a launch issues is the sum over its instructions of how often each
runs, times warps, times programs. Loops are found in the machine code; how often one runs its caller knows.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
_LABEL = re.compile(r"^(\.L\S*):")
_DOUBLE = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)|MUFU\.\w+64|F2F\.\S*F64|I2F\.\S*F64|F2I\.\S*F64")
_TARGET = re.compile(r"`\(([^)]+)\)")


def disassemble(cubin: bytes) -> str:
    """SASS of a compiled kernel, by the disassembler that comes with Triton.

    Raises:
        RuntimeError: the disassembler fails.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done.stdout


def operations(sass: str) -> list[tuple[str, int]]:
    """Each instruction's name with its modifiers, as DFMA.RN, and the number of loops around it.

    A loop is what lies between a backward branch and its target; padding after the last instruction does not count, nor
    does the branch to itself behind it.
    """
    names: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in map(str.strip, sass.splitlines()):
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(names)
        elif found := _INSTRUCTION.search(line):
            name, operands = found.groups()
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


def by_loop_depth(found: list[tuple[str, int]]) -> tuple[int, ...]:
    """Of `operations`, those outside of any loop, inside one loop, inside two, ..."""
    depths = [depth for _, depth in found]
    return tuple(depths.count(level) for level in range(max(depths, default=0) + 1))


def in_float64(found: list[tuple[str, int]]) -> int:
    """Of `operations`, those that compute with doubles, of which most GPUs do few at a time."""
    return sum(bool(_DOUBLE.match(name)) for name, _ in found)
