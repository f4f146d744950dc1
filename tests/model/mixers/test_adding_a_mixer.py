"""docs/adding-a-mixer.md works: with its file and its two lines all commands on it do what it says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from matmix.train.recipe_files import read_toml

NAME = "gated_average"


PAGE = (ROOT / "docs/adding-a-mixer.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands(start: str) -> list[list[str]]:
    """What follows `start` in those of the page's commands that begin so."""
    return [shlex.split(words) for words in re.findall(rf"^    {re.escape(start)} (.*)$", PAGE, flags=re.MULTILINE)]


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with the package as it is once the page was followed: the rooms, and a copy of `model` with the file."""
    site = tmp_path_factory.mktemp("site")
    (site / "matmix").mkdir()
    for room in ("kernels", "data", "train", "use", "launch"):
        (site / "matmix" / room).symlink_to(ROOT / room)
    shutil.copytree(ROOT / "model", site / "matmix/model", ignore=shutil.ignore_patterns("__pycache__"))
    file, registration = code_blocks("python")
    (site / "matmix/model/mixers" / f"{NAME}.py").write_text(file)
    imported, entry = registration.splitlines()
    registry = site / "matmix/model/mixers/__init__.py"
    text = registry.read_text()
    text = text.replace("from matmix.model.mixers.scans.hydra", f"{imported}\nfrom matmix.model.mixers.scans.hydra", 1)
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
    (words,) = commands(".venv/bin/python -P")
    output = run_in(package, *words, "-q", "-p", "no:cacheprovider", folder=ROOT)
    passed = int(re.search(r"(\d+) passed", output)[1])
    assert passed >= 8
    assert "failed" not in output


def matmix(package: Path, calls: list[list[str]], folder: Path) -> str:
    """The output of `matmix` called with each of these words, in one process."""
    code = f"import sys; from matmix.launch.cli import main; sys.exit(any(main(words) for words in {calls!r}))"
    return run_in(package, "-c", code, folder=folder)


@pytest.mark.slow
def test_the_mixer_is_compared_at_equal_parameters(package, tmp_path):
    ((recipe, copy),) = commands("cp")
    (entry,) = code_blocks("toml")
    (tmp_path / copy).write_text(f"{(ROOT / recipe).read_text()}\n{entry}")
    (words,) = commands("matmix compare")
    output = matmix(package, [["compare", *words]], tmp_path)
    (line,) = (line for line in output.splitlines() if line.startswith("| gated average"))
    wanted = read_toml(ROOT / recipe)["comparison"]["parameters"]
    assert abs(int(re.search(r"\d{3},\d{3}", line)[0].replace(",", "")) / wanted - 1) < 0.01


@pytest.mark.slow
def test_the_mixer_trains_and_can_be_looked_at(package, dataset, tmp_path):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/shakespeare").symlink_to(dataset)  # where the recipe looks
    calls = [[verb, *words] for verb in ("train", "show-mixer") for words in commands(f"matmix {verb}")]
    assert len(calls) == 2
    output = matmix(package, calls, tmp_path)
    assert "Finished at step 8" in output
    assert "blocks at most 1 / 1" in output
    assert (tmp_path / f"pictures/debug_hydra/layer-01-{NAME}-step-8.png").is_file()
