"""Exports load, and give the same numbers, where transformers and PyTorch are installed and matmix is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bare_site import make_bare_site
from nightly import nightly

CHECK = Path(__file__).with_name("bare") / "bare_check.py"
# A Python of an environment with another (newer) transformers and no matmix.
OTHER_PYTHON = os.environ.get("MATMIX_TRANSFORMERS5_PYTHON", "")


def run_check(python: str, options: list[str], arguments: list[Path], home: Path, check: Path = CHECK) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [python, *options, str(check), *map(str, arguments)]
    run = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()[-1]


def some_of(exports: Path, names: tuple[str, ...], folder: Path) -> Path:
    """Returns a folder with those of the exports; all of them where no names are given."""
    if not names:
        return exports
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(exports / name)
    return folder


@pytest.mark.parametrize(("models", "heads"), [(("mru", "hydra"), ("classes",)), nightly((), ())])
def test_exports_work_with_transformers_and_torch_only(exports, head_exports, tmp_path, models, heads):
    work, with_heads = some_of(exports, models, tmp_path / "work"), some_of(head_exports, heads, tmp_path / "heads")
    site = make_bare_site(tmp_path / "site")
    # -I -S: no PYTHONPATH, no site-packages, no .pth files.
    last = run_check(sys.executable, ["-I", "-S"], [work, with_heads, site], tmp_path)
    assert last.startswith("ok: transformers 4.")


@pytest.mark.slow
def test_other_libraries_take_exports_where_matmix_is_not(exports, head_exports, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    site = make_bare_site(tmp_path / "site", ("torch", "transformers", "accelerate", "sentence-transformers"))
    last = run_check(sys.executable, ["-I", "-S"], [exports, head_exports, site], tmp_path)
    assert last.endswith("accelerate, sentence_transformers")


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_PYTHON, reason="MATMIX_TRANSFORMERS5_PYTHON names no Python with transformers 5")
def test_exports_work_with_newer_transformers(exports, head_exports, tmp_path):
    last = run_check(OTHER_PYTHON, ["-I"], [exports, head_exports], tmp_path)
    assert last.startswith("ok: transformers ")
    assert not last.startswith("ok: transformers 4.")
