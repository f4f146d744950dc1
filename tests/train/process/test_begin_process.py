"""What every process of ours does before it imports torch."""

import subprocess
import sys

START = """
import gc
from matmix.train.process.console import begin_process
begin_process()
import torch
print(sum(generation["collections"] for generation in gc.get_stats()), gc.isenabled())
"""


def test_imports_are_not_slowed_by_looking_for_garbage():
    found = subprocess.run([sys.executable, "-P", "-c", START], capture_output=True, text=True, check=True)
    collections, enabled = found.stdout.split()
    assert int(collections) < 100  # by Python's own thresholds 367
    assert enabled == "True"
