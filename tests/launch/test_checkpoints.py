"""`matmix checkpoints RUN`: what it says of whole, damaged and unfinished checkpoints, and its exit code."""

import shutil
import subprocess
import sys

import pytest
from folders import flip_a_bit
from runs import run_recipe

from matmix.launch.cli import main
from matmix.launch.listings import Convert, format_size
from matmix.use.exporting import MAX_FILE_BYTES


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3; tests copy it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    run_recipe("debug_mru", dataset, run, "--stop-step", "3", "--checkpoint.every", "1", "--checkpoint.keep-last", "3")
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_the_size_of_files_is_the_one_that_help_shows():
    """Written a second time there, so that --help does not import what converts."""
    assert Convert(source="run", out="other").max_file_bytes == MAX_FILE_BYTES


def table(capsys, *arguments):
    """(exit code, rows of the table without its head, the lines below it)."""
    capsys.readouterr()
    code = main(["checkpoints", *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    end = lines.index("")
    assert lines[0].split() == ["step", "tokens", "size", "engine", "ranks", "written", "state"]
    return code, lines[1:end], lines[end + 1 :]


def shard(run, step):
    return next((run / "checkpoints" / f"step-{step:08d}" / "sharded").glob("__0_0.distcp"))


def test_all_whole(run, capsys):
    code, rows, below = table(capsys, run)
    assert code == 0
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert all(row.endswith("valid, sizes checked") and " torch " in row for row in rows)
    tokens = [int(row.split()[1].replace(",", "")) for row in rows]
    assert tokens[0] > 0
    assert tokens == sorted(set(tokens))
    assert below == ["a resume would use step-00000003 if its checksums are right (--verify reads them)"]
    code, rows, below = table(capsys, run, "--verify")
    assert code == 0
    assert all(row.endswith("valid, checksums read") for row in rows)
    assert below == ["a resume would use step-00000003"]


def test_damage(run, capsys):
    flip_a_bit(shard(run, 3))
    code, rows, below = table(capsys, run)  # its size is as it was
    assert (code, below[0].split()[4]) == (0, "step-00000003")
    code, rows, below = table(capsys, run, "--verify")
    assert code == 1
    assert rows[2].endswith("is damaged: sharded/__0_0.distcp does not match its checksum")
    assert below == ["a resume would use step-00000002"]

    shard(run, 2).unlink()
    (run / "checkpoints" / "step-00000001" / "checkpoint.json").write_text("{")
    (run / "checkpoints" / ".tmp-step-00000004").mkdir()
    code, rows, below = table(capsys, run, "--verify")
    assert code == 1
    assert rows[1].endswith("is damaged: sharded/__0_0.distcp is missing")
    assert rows[0].endswith("is damaged: its checkpoint.json cannot be read")
    assert below[0] == "a resume would stop: none of them is valid"
    assert below[1].startswith("leftover: .tmp-step-00000004 ")
    assert len(below) == 2


def test_nothing_to_list(run, tmp_path, capsys):
    shutil.rmtree(run / "checkpoints")
    assert main(["checkpoints", str(run)]) == 0
    assert capsys.readouterr().out == "no checkpoints yet\n"
    assert main(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert "run directory not found" in capsys.readouterr().err
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_sizes_are_readable():
    sizes = [0, 999, 1000, 1500, 999_940, 12_345_678, 3_200_000_000, 5e12, 7e15]
    assert [format_size(size) for size in sizes] == [
        *("0 B", "999 B", "1.0 kB", "1.5 kB", "999.9 kB", "12.3 MB", "3.2 GB", "5.0 TB", "7000.0 TB")
    ]


def test_the_list_imports_no_torch(run):
    program = "import sys; from matmix.launch.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-P", "-c", program, "checkpoints", str(run)], stdout=subprocess.DEVNULL
        ).returncode
        == 0
    )
