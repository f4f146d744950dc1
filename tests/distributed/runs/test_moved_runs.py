"""A run directory that is moved away and replaced under several ranks: all notice, save where it is now, and say the
same."""

from pathlib import Path

import pytest
import run_scenarios
from harness import run_distributed
from runs import records

ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "ddp": ["--engine.name", "ddp"],
    "zero1": ["--engine.name", "deepspeed", "--engine.zero-stage", "1"],
}
COMMON = ["--device", "cpu", "--steps", "5", "--checkpoint.every", "3", "--logging.every", "1", "--gc-every", "0"]


@pytest.mark.slow
def test_every_engine_saves_where_the_run_is_now(dataset, tmp_path):
    runs = {name: tmp_path / name / "run" for name in ENGINES}
    common = [*COMMON, "--data.path", dataset, "--evaluation.every", "0", "--logging.progress", "False"]
    starts = [("debug_mru", [*common, *ENGINES[name], "--run-dir", str(run)]) for name, run in runs.items()]
    again = [
        ("debug_mru", [*common, *ENGINES[name], "--run-dir", str(run.with_name("elsewhere"))])
        for name, run in runs.items()
    ]
    told = run_distributed(run_scenarios.move_all, 2, arguments=(starts, 4, again), timeout=600)
    for number, run in enumerate(runs.values()):
        moved = run.with_name("elsewhere")
        what = f"run_dir {run} was moved to {moved} and replaced by another one while the run wrote to it"
        words = f"{what}; step 4 is saved there: matmix train {moved} goes on"
        assert [said[number] for said in told] == [words, words]
        assert list(Path(run).iterdir()) == []
        assert (moved / "checkpoints" / "step-00000005").is_dir(), "it went on there"
        assert [record["step"] for record in records(moved)] == [1, 2, 3, 4, 5]
