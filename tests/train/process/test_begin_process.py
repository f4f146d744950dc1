"""How long a start takes: what every process of ours does before it imports torch, and what it leaves for later."""

import os
import subprocess
import sys

import pytest

START = """
import gc
from matmix.train.process.console import begin_process
begin_process()
import torch
print(sum(generation["collections"] for generation in gc.get_stats()), gc.isenabled())
"""


@pytest.mark.slow
def test_imports_are_not_slowed_by_looking_for_garbage():
    found = subprocess.run([sys.executable, "-P", "-c", START], capture_output=True, text=True, check=True)
    collections, enabled = found.stdout.split()
    assert int(collections) < 100  # by Python's own thresholds 367
    assert enabled == "True"


AT_THE_FIRST_STEP = """
import sys
from matmix.train.callbacks import Callback

class Imported(Callback):
    def on_step(self, run):
        (run.path / "imported").write_text(" ".join(sys.modules))
"""


@pytest.mark.slow
def test_one_process_does_its_first_step_without_what_it_has_no_use_for(dataset, tmp_path):
    (tmp_path / "imported.py").write_text(AT_THE_FIRST_STEP)
    options = ["--data.path", dataset, "--run-dir", "run", "--stop-step", "1", "--device", "cpu"]
    options += ["--callback", "{name = 'imported:Imported'}"]
    command = [sys.executable, "-m", "matmix.train", "debug_hydra", *options]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)
    imported = set((tmp_path / "run" / "imported").read_text().split())
    assert "torch.optim" in imported
    # Together they take longer than all that is imported besides torch itself.
    late = {"torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.checkpoint", "matplotlib"}
    assert not (late | {"pytorch_optimizer", "torchao"}) & imported
