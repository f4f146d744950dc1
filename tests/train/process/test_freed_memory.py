"""Freed memory stays in the process, where its user does not say otherwise."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps its own settings")

CODE = """
import resource
import torch
from matmix.train.process.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 * 2**20).add(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back, kept = faults(), keep_freed_memory()
print(given_back, int(kept), min(faults() for _ in range(5)))
"""


def run(**environment: str) -> tuple[int, int, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-P", "-c", CODE], env=clean | environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    first, kept, last = map(int, done.stdout.split())
    return first, kept, last


@pytest.mark.slow
def test_what_is_freed_is_used_again():
    given_back, kept, after = run()
    assert kept == 1
    assert given_back > 10 * after + 10  # pages of two tensors of 48 MB, each of 4 KB or more


@pytest.mark.slow
def test_what_the_environment_says_holds():
    given_back, kept, after = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == 0
    assert after == pytest.approx(given_back, rel=0.1)
