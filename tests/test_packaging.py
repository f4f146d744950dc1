"""The package list, the data that must travel with it, and the contract between the rooms."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from nightly import nightly
from paths import ROOT

import matmix
from matmix.launch.cli import VERBS
from matmix.launch.tree import Branch

ROOMS = ("kernels", "model", "data", "train", "use", "launch")


def _pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed():
    found = {
        ".".join(("matmix", *path.parent.relative_to(ROOT).parts))
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert set(_pyproject()["tool"]["setuptools"]["packages"]) == {"matmix", *found}


def test_every_folder_with_code_is_a_package():
    bare = {
        str(path.parent.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert not bare


def test_every_dependency_is_pinned_for_the_tests():
    pinned = {
        line.split("==")[0].strip().lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = _pyproject()["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.match(r"[A-Za-z0-9_.-]+", line)[0].lower().replace("_", "-") for line in wanted}
    assert names <= pinned


def test_the_version_is_that_of_the_project():
    assert matmix.__version__ == _pyproject()["project"]["version"]
    assert f"\nversion: {matmix.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    with pytest.raises(AttributeError, match="'version_info'"):
        _ = matmix.version_info


def test_a_wheel_holds_recipes_corpora_and_the_version(tmp_path):
    source = tmp_path / "source"  # building leaves files beside the sources
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "__init__.py"):
        shutil.copy(ROOT / name, source / name)
    project = re.sub(r'(?m)^version = ".*"$', 'version = "7.8.9"', (ROOT / "pyproject.toml").read_text())
    (source / "pyproject.toml").write_text(project)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("matmix-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "matmix/train/recipes/mru_shakespeare.toml" in names
    assert "matmix/train/recipes/glue/glue_rte.toml" in names
    assert any(name.startswith("matmix/data/corpora/") and name.endswith(".xz") for name in names)
    assert not [name for name in names if name.split("/")[0] not in ("matmix",) and ".dist-info" not in name]
    code = "import matmix, sys; print(matmix.__version__, 'torch' in sys.modules, matmix.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(wheel), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["7.8.9", "False", f"{wheel}/matmix/__init__.py"], done.stderr


def test_rooms_import_only_from_below():
    run = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("shell", ["bash", nightly("zsh"), nightly("fish")])
def test_a_shell_can_complete_verbs_and_options(shell, tmp_path):
    matmix, script = Path(sys.executable).with_name("matmix"), tmp_path / "completion"
    words = [str(matmix), "--tyro-write-completion", shell, str(script)]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    names = ("prepare", "train", "compare", "launch", "torchrun", "resubmit", "show-mixer", "convert", "max-new-tokens")
    assert not [name for name in names if name not in script.read_text()]


def every_verb(verbs: Mapping[str, Branch] = VERBS, path: str = "") -> Iterator[str]:
    for name, branch in verbs.items():
        yield f"{path}{name}"
        if not isinstance(branch.verb, str):
            yield from every_verb(branch.verb, f"{path}{name} ")


def test_help_and_recipes_wait_for_no_torch(tmp_path):
    """In an empty folder: the help of every verb, the list of the verbs, and the recipes."""
    commands = ["--help", "--version", "recipes", "recipes quickstart", *(f"{verb} --help" for verb in every_verb())]
    code = (
        "import sys; from matmix.launch.cli import main; assert main(['launch']) == 2\n"
        "for command in sys.argv[1:]:\n"
        "    assert main(command.split()) == 0, command\n"
        "    assert 'torch' not in sys.modules, command\n"
    )
    words = [sys.executable, "-P", "-c", code, *commands]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage:") >= len(commands) - 3
    for verb in ("train", "checkpoints", "launch", "show-mixer"):
        assert re.search(rf"\W {verb} ", run.stdout)


def test_an_unknown_verb_is_one_line(tmp_path):
    matmix = Path(sys.executable).with_name("matmix")
    run = subprocess.run([str(matmix), "trian"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert "trian" in run.stderr


_HEIGHT = {"kernels": 0, "model": 1, "data": 1, "train": 2, "use": 3, "launch": 4, "benchmarks": 5, "studies": 6}
_NAMED = re.compile(rf"(?<![.\w])matmix\.(?:{'|'.join(_HEIGHT)})(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


def _named_modules() -> list[tuple[str, str]]:
    """(file, name) for every matmix.x.y in the code, strings, comments and templates of the rooms, and beside them."""
    return sorted(
        {
            (str(path.relative_to(ROOT)), name)
            for room in _HEIGHT
            for path in (ROOT / room).rglob("*")
            if path.suffix in (".py", ".sbatch", ".toml")
            for name in _NAMED.findall(path.read_text())
        }
    )


def _exists(name: str) -> bool:
    """Whether a name is a module, or something in one: package.module.Class.method."""
    words, place = name.split(".")[1:], ROOT
    while words and (place / words[0]).is_dir():
        place /= words.pop(0)
    in_module = bool(words) and (place / f"{words[0]}.py").is_file()
    source = place / (f"{words.pop(0)}.py" if in_module else "__init__.py")
    return source.is_file() and all(re.search(rf"\b{word}\b", source.read_text()) for word in words)


def test_modules_that_strings_name_exist():
    """Commands, messages and docstrings name modules, too, and no import tells when one has moved."""
    assert not [(path, name) for path, name in _named_modules() if not _exists(name)]


def test_strings_name_modules_of_the_same_room_or_below():
    upwards = []
    for path, name in _named_modules():
        own, other = path.split("/")[0], name.split(".")[1]
        if _HEIGHT[other] > _HEIGHT[own]:
            upwards.append((path, name))
    assert not upwards


def test_modules_that_docs_run_are_not_imported_by_their_package():
    """Python warns of those that are, in the middle of the output."""
    texts = [ROOT / "Makefile", ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "launch").rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"-m (matmix(?:\.\w+)+)", text.read_text(encoding="utf-8"))}
    modules = {
        name for name in found if (ROOT / name.removeprefix("matmix.").replace(".", "/")).with_suffix(".py").is_file()
    }
    assert len(modules) >= 2
    check = "import sys; [__import__(name.rpartition('.')[0]) for name in sys.argv[1:]]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", check, *modules], capture_output=True, text=True, check=True)
    assert not modules & set(done.stdout.split())


def test_rooms_below_launch_name_no_scheduler():
    rooms = [path for room in ("kernels", "model", "data", "train") for path in (ROOT / room).rglob("*.py")]
    assert [str(path) for path in rooms if re.search(r"slurm|scontrol", path.read_text(encoding="utf-8"), re.I)] == []
