"""Runs side by side whose folder is moved away while they go on."""

import sys
import time
from pathlib import Path

import pytest

from matmix.launch.many import runs
from matmix.launch.many.planned import PlannedRun
from matmix.train.recipe import load_config
from matmix.train.run.directory import MovedError

PROCESS = "import time; print('begun', flush=True); time.sleep(60)"


def test_nothing_is_started_in_the_place_of_a_folder_that_was_moved(tmp_path, monkeypatch):
    """What runs is asked to save and end; nothing else is begun, and no table is written."""
    home = tmp_path / "runs"
    configs = [load_config("debug_mru", ["--run-dir", str(home / f"seed-{seed}")]) for seed in range(3)]
    tasks = [PlannedRun(entry="a", seed=seed, config=config) for seed, config in enumerate(configs)]
    started = []

    def start(module: str, recipe: Path, *, parallel: int, place: int, **options: object) -> object:
        started.append(recipe.name)
        process = runs.subprocess.Popen([sys.executable, "-c", PROCESS], **options)
        while (home / recipe.stem / "train.log").stat().st_size == 0:
            time.sleep(0.02)
        home.rename(tmp_path / "elsewhere")
        return process

    monkeypatch.setattr(runs, "start", start)
    with pytest.raises(MovedError, match=r"/runs was moved to .*/elsewhere while runs went on in it; what was running"):
        runs.run_tasks(tasks, 1)
    assert started == ["seed-0.toml"]
    assert not home.exists()
    assert (tmp_path / "elsewhere" / "seed-0" / "train.log").read_text() == "begun\n"
