"""An error that several ranks have is said once, one that a single rank has with its number, and none is lost."""

import os
import subprocess
import sys
import time

import pytest

from matmix.launch.jobs.processes import run_ranks, stop_requests
from matmix.train.process import console
from matmix.train.process.node_folders import make_own_folder

# What each rank ends with, by its number; ranks without an error go on until they are told to stop.
RANK = """
import os, pathlib, sys, time
from matmix.train.errors import PeerError, RunFailure
from matmix.train.process import stop
from matmix.train.process.console import guarded

stop.listen()

# The launcher ends late ranks when the first has ended, so that none begins to count before all are there.
here = pathlib.Path({here!r})
(here / os.environ["RANK"]).touch()
while len(list(here.iterdir())) < 3:
    time.sleep(0.02)

def fail():
    seconds, error = {errors}.get(int(os.environ["RANK"]), (60, None))
    end = time.monotonic() + seconds
    while time.monotonic() < end and (error is not None or not stop.received()):
        time.sleep(0.02)
    if error is not None:
        raise error
    return 75

sys.exit(guarded(fail, every_rank=True))
"""
ALIKE = "(0.3 * (3 - int(os.environ['RANK'])), ValueError('data is missing'))"


@pytest.mark.parametrize(
    ("errors", "lines"),
    [
        # Rank 0 is the last to find it.
        (f"{{0: {ALIKE}, 1: {ALIKE}, 2: {ALIKE}}}", ["data is missing"]),
        # What follows from an error comes after it, and once.
        (
            "{0: (0.1, PeerError('a is gone')), 1: (0.1, PeerError('b is gone')), 2: (0.3, OSError('disk full'))}",
            ["[rank 2] disk full", "... is gone"],
        ),
        # The launcher ends the other ranks at once.
        ("{0: (0, RunFailure('diverged')), 1: (0.1, ValueError('no file'))}", ["diverged", "[rank 1] no file"]),
        ("{1: (0, ValueError('no file')), 2: (0, ValueError('no file'))}", ["no file"]),
    ],
)
def test_what_ranks_say(errors, lines, tmp_path, capfd):
    here = tmp_path / "here"
    here.mkdir()
    code = RANK.replace("{errors}", errors).replace("{here!r}", repr(str(here)))
    with stop_requests() as requests:
        run_ranks([sys.executable, "-P", "-c", code], 3, os.environ, requests)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("matmix: error: ")]
    said = [line.removeprefix("matmix: error: ") for line in said]
    if lines in (["no file"], ["[rank 2] disk full", "... is gone"]):  # the last is said by either of two ranks
        assert said[-1].endswith(lines[-1].removeprefix("..."))
        said[-1] = lines[-1]
    assert said == lines
    assert list(make_own_folder().glob("store-*")) == []


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Folders of torch's agent, of a store, and of logs that are moved while the ranks run."""
    monkeypatch.setattr(console, "_MOMENT", 0.05)
    monkeypatch.setattr(console, "_handle", None)
    monkeypatch.setenv("WORLD_SIZE", "3")

    def share(kind: str) -> None:
        if kind == "agent":
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
        elif kind == "store":
            monkeypatch.setenv("MATMIX_STORE", str(tmp_path / "store"))
        else:
            console.share(tmp_path / "logs")
            (tmp_path / "logs").rename(tmp_path / "moved")

    return share


@pytest.mark.parametrize("kind", ["agent", "store", "logs"])
def test_every_launcher_gives_ranks_a_folder(kind, shared, monkeypatch, capsys):
    shared(kind)

    def say(rank: int, text: str) -> str:
        monkeypatch.setenv("RANK", str(rank))
        console.report(ValueError(text), every_rank=True)
        return capsys.readouterr().err

    assert say(0, "wrong") == "matmix: error: wrong\n"
    assert say(1, "wrong") == ""
    assert say(2, "own") == "matmix: error: [rank 2] own\n"
    assert say(0, "own") == ""


def test_ranks_that_share_nothing_all_speak(shared, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    began = time.monotonic()
    console.report(ValueError("wrong"), every_rank=True)
    assert capsys.readouterr().err == "matmix: error: [rank 1] wrong\n"
    assert time.monotonic() - began < 1, "there is nothing to wait for"


@pytest.mark.slow
def test_torchrun_shows_the_mistake_of_all_ranks_once(tmp_path):
    """From the parts that run before torch is imported on."""
    words = ["--standalone", "--nproc-per-node=2", "-m", "matmix.train", "debug_mru", "--data.pat", "x"]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.stderr.count('matmix: error: command line: unknown key "data.pat"') == 1
    assert done.stderr.count("matmix: error: ") == 1
