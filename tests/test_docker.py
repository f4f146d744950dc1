"""The Dockerfile: what a user of the image relies on. hadolint reads it in `make lint`; nothing here builds it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from paths import ROOT


def _instructions() -> list[tuple[str, str]]:
    """(NAME, the rest) for each instruction, lines that go on joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def _of(wanted: str) -> list[str]:
    return [rest for name, rest in _instructions() if name == wanted]


def test_everything_is_installed_as_it_is_pinned():
    installs = [part for run in _of("RUN") for part in run.split("&&") if "pip install" in part]
    assert len(installs) == 2
    assert all("--constraint" in part for part in installs)


def test_the_packages_are_those_of_the_project():
    (command,) = re.findall(r'python -c "(.+?)"\s*>', "\n".join(_of("RUN")))
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert done.stdout.splitlines() == [*project["dependencies"], *extras["s3"], *extras["vision"]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_devices_have_a_base(device):
    stages = [rest.split(" AS ") for rest in _of("FROM")]
    assert [name for _, *name in stages if name == [device]]
    assert stages[-1] == ["${DEVICE}"]


def test_the_base_is_of_the_cuda_that_the_pinned_torch_is_for():
    (base,) = [rest for rest in _of("FROM") if rest.startswith("nvidia/cuda")]
    assert re.search(r"(?m)^nvidia-cuda-runtime==13\.0\.", (ROOT / "constraints.txt").read_text())
    assert base.startswith("nvidia/cuda:13.0.")


def test_matmix_is_what_runs_and_not_as_root():
    names = [name for name, _ in _instructions()]
    assert _of("USER")[-1] != "0"
    assert _of("USER")[-1].isdigit()
    assert "RUN" not in names[names.index("USER") :]
    assert _of("ENTRYPOINT") == ['["matmix"]']


def test_the_context_has_the_package_and_nothing_of_a_person():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {name.split(".")[1] for name in tool["packages"] if "." in name} <= kept
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "__init__.py"} <= kept
    assert not kept & {".git", ".venv", "runs", "datasets", "exports", "tests"}
