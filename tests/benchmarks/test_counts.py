"""What kernels cost in compiled code is counted, kept, and may not grow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from matmix.benchmarks.compiling import by_loop_depth, in_float64, operations
from matmix.benchmarks.counts import grown, read

KEPT = read()
# Two loops, the second in the first; a branch forward, padding, and the branch to itself that ends every kernel.
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_2:
        /*0030*/                   FADD R3, R3, R3 ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/              @!UP1 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/                   EXIT ;
.L_x_4:
        /*0070*/                   BRA `(.L_x_4);
        /*0080*/                   NOP;
"""


def test_instructions_are_counted_by_the_loops_around_them():
    assert by_loop_depth(operations(SASS)) == (4, 2, 2)


def test_doubles_are_found_and_nothing_else():
    names = [
        "DADD",
        "DFMA.RN",
        "MUFU.RCP64H",
        "F2F.F32.F64",
        "DMMA.8x8x4",
        "DEPBAR.LE",
        "FADD",
        "MUFU.EX2",
        "F2F.BF16.F32",
        "IDP",
    ]
    assert in_float64([(name, 0) for name in names]) == 5


def counts(*words: str) -> subprocess.CompletedProcess:
    """The command in a process that never saw TRITON_INTERPRET."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-m", "matmix.benchmarks", "counts", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(("_convolve", "_gated_norm"), id="light"),
        pytest.param(tuple(dict.fromkeys(x.kernel for x in KEPT)), id="all", marks=pytest.mark.slow),
    ],
)
def test_kernels_cost_no_more_than_what_is_kept(kernels):
    done = counts("--check", *kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no more than is kept" in done.stdout


@pytest.mark.slow
def test_a_kernel_without_counts_is_named():
    done = counts("--check", "mixing")
    assert done.returncode == 2
    assert "no kernel 'mixing' is counted; there are" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_has_grown_is_named():
    first, *others = KEPT
    assert grown(KEPT, KEPT) == []
    little = first._replace(warp_instructions=first.warp_instructions * 1.04)
    assert grown(KEPT, [little, *others]) == []
    (line,) = grown(KEPT, [first._replace(bytes=first.bytes * 1.06), *others])
    assert f"{first.kernel} (launch {first.number}): bytes" in line
    (line,) = grown(KEPT, [first._replace(resident_warps=first.resident_warps - 4)])
    assert "resident_warps" in line
    (line,) = grown(others, [first])
    assert "was not counted before" in line


def test_the_kept_kernels_compute_with_no_doubles():
    assert {x.kernel for x in KEPT} >= {
        "decay_sums",
        "state_pass",
        "mix",
        "pair_gradients",
        "vector_gradients",
        "cayley_pass",
    }
    assert not any(x.float64 for x in KEPT)
