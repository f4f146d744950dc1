"""docs/adding-a-mixer.md works: its file and its two lines make a mixer that passes the proofs and trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "gated_average"


def code_blocks() -> list[str]:
    page = (ROOT / "docs/adding-a-mixer.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with the package as it is once the page was followed: the rooms, and a copy of `model` with the file."""
    site = tmp_path_factory.mktemp("site")
    (site / "matmix").mkdir()
    for room in ("kernels", "data", "train", "launch"):
        (site / "matmix" / room).symlink_to(ROOT / room)
    shutil.copytree(ROOT / "model", site / "matmix/model", ignore=shutil.ignore_patterns("__pycache__"))
    file, registration = code_blocks()
    (site / "matmix/model/mixers" / f"{NAME}.py").write_text(file)
    imported, entry = registration.splitlines()
    registry = site / "matmix/model/mixers/__init__.py"
    text = registry.read_text()
    text = text.replace("from matmix.model.mixers.hydra", f"{imported}\nfrom matmix.model.mixers.hydra", 1)
    registry.write_text(re.sub(r"^MIXERS.*\{\n", lambda start: f"{start[0]}{entry}\n", text, flags=re.MULTILINE))
    return site


def run_in(package: Path, *arguments: str, folder: Path) -> str:
    """The output of a Python that imports the package from there."""
    run = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_file_is_written_as_all_others(package):
    file = f"{package}/matmix/model/mixers/{NAME}.py"
    run_in(package, "-m", "ruff", "check", "--no-cache", file, folder=ROOT)
    run_in(package, "-m", "ruff", "format", "--no-cache", "--check", file, folder=ROOT)


def test_the_mixer_passes_all_proofs(package):
    words = ["-m", "pytest", "tests/model/test_mixers.py", "-k", NAME, "-q", "-p", "no:cacheprovider"]
    output = run_in(package, *words, folder=ROOT)
    passed = int(re.search(r"(\d+) passed", output)[1])
    assert passed >= 12
    assert "failed" not in output


@pytest.mark.slow
def test_the_mixer_trains_and_can_be_looked_at(package, dataset, tmp_path):
    words = ["--data.path", dataset, "--steps", "2", f"--model.mixers.{NAME.replace('_', '-')}.headdim", "16"]
    train = ["train", "debug_hydra", "--model.layers", NAME, *words, "--evaluation.every", "0", "--device", "cpu"]
    show = ["show-mixer", "runs/debug_hydra", "--text", "the king speaks", "--layers", "1"]
    code = f"import sys; from matmix.launch.cli import main; sys.exit(main({train}) or main({show}))"
    output = run_in(package, "-c", code, folder=tmp_path)
    assert "Finished at step 2" in output
    assert "blocks at most 1 / 1" in output
    assert (tmp_path / f"pictures/debug_hydra/layer-01-{NAME}-step-2.png").is_file()
