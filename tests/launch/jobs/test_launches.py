"""A launch keeps the code it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from matmix.launch.jobs import launches


def run_python(code: str, path: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_copied_code_is_what_runs(tmp_path):
    folder = tmp_path / "launch" / "1"
    launches.take_snapshot(folder)
    copied = folder / "code" / "matmix"
    assert sorted(path.name for path in copied.iterdir()) == ["__init__.py", *sorted(launches.ROOMS)]
    assert not list(copied.rglob("__pycache__"))
    assert (copied / "train" / "recipes" / "debug_mru.toml").is_file()
    assert (copied / "launch" / "jobs" / "slurm" / "templates" / "train.sbatch").is_file()
    # The installed package, too, is there; the copy goes first.
    (copied / "train" / "process" / "exits.py").write_text("EXIT_OK = 'the copy'\n")
    assert run_python("from matmix.train.process.exits import EXIT_OK; print(EXIT_OK)", folder / "code") == "the copy"
    installed = tmp_path / "installed" / "matmix"  # as from a wheel
    shutil.copytree(copied, installed)
    (installed / "train" / "process" / "exits.py").write_text("EXIT_OK = 'the installed'\n")
    both = Path(f"{folder / 'code'}{os.pathsep}{installed.parent}")
    assert run_python("from matmix.train.process.exits import EXIT_OK; print(EXIT_OK)", both) == "the copy"
    packages = (folder / "packages.txt").read_text()
    assert "\ntorch==" in packages
    assert sys.executable in packages


def test_a_copy_can_be_copied_again_without_git(tmp_path):
    """As from a wheel: package folders somewhere, no working copy around them."""
    launches.copy_code(tmp_path / "code")
    code = (
        "from pathlib import Path; from matmix.launch.jobs import launches; "
        f"launches.take_snapshot(Path({str(tmp_path / 'second')!r}))"
    )
    run_python(code, tmp_path / "code", GIT_CEILING_DIRECTORIES=str(tmp_path))
    assert (tmp_path / "second" / "code" / "matmix" / "model" / "config.py").is_file()
    assert "not from a git working copy" in (tmp_path / "second" / "revision.txt").read_text()
    assert not (tmp_path / "second" / "diff.patch").exists()


def test_changes_are_kept_as_a_patch(tmp_path):
    """In a working copy of its own: the one that runs the tests may be clean or not."""
    copy = tmp_path / "copy"
    launches.copy_code(tmp_path / "code")
    shutil.move(tmp_path / "code" / "matmix", copy)

    def git(*words: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(copy), *settings, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", "launch", "train/process/exits.py")
    git("commit", "-qm", "first")
    code = "from matmix.launch.jobs.launches import describe_revision as d; r, p = d(); print(r); print(p.decode())"
    (tmp_path / "import").mkdir()
    (tmp_path / "import" / "matmix").symlink_to(copy)
    clean = run_python(code, tmp_path / "import")
    assert f"git {git('rev-parse', 'HEAD')}\n" in clean
    with (copy / "train" / "process" / "exits.py").open("a") as file:
        file.write("EXIT_NEW = 9\n")
    changed = run_python(code, tmp_path / "import")
    assert "with changes" in changed
    assert "+EXIT_NEW = 9" in changed
    assert "kernels/__init__.py" in changed  # a file that git does not know


def test_a_copy_in_a_foreign_repository_has_no_revision(tmp_path):
    """The HEAD of a repository that happens to lie around the code says nothing of the code."""
    launches.copy_code(tmp_path / "code")
    git = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.com",
        "-c",
        "commit.gpgsign=false",
    ]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True)
    code = "from matmix.train.run.outcome import git_revision; print(repr(git_revision()))"
    assert run_python(code, tmp_path / "code") == "''"
    code = "from matmix.launch.jobs.launches import describe_revision; print(describe_revision()[0])"
    assert "not from a git working copy" in run_python(code, tmp_path / "code")


def test_launches_of_the_same_second_have_different_names(tmp_path):
    first = launches.new_launch_id(tmp_path)
    (tmp_path / "launch" / first).mkdir(parents=True)
    (tmp_path / "launch" / f"{first}-2").mkdir(parents=True)
    assert launches.new_launch_id(tmp_path) not in (first, f"{first}-2")
