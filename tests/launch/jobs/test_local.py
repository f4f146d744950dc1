"""`matmix launch local` end to end: real ranks, and what they leave."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from matmix.launch.cli import main
from matmix.launch.jobs.attempts import read_attempts
from matmix.train.process.exits import EXIT_STOPPED
from matmix.train.recipe_files import find_recipe


class Local:
    """A running `matmix launch local RECIPE --nproc 2`, its output in a file."""

    def __init__(self, dataset: str, folder: Path, *overrides: str, recipe: str = "debug_mru") -> None:
        self.run, self.output = folder / "run", folder / "output.txt"
        self.records = self.run / "metrics.jsonl"
        words = ["-m", "matmix.launch.cli", "launch", "local", recipe, "--nproc", "2", "--device", "cpu"]
        words += ["--data.path", dataset, "--run-dir", str(self.run), "--logging.every", "1", *overrides]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *words], stdout=output, stderr=output, start_new_session=True
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for_step(self, step: int, seconds: float = 200) -> None:
        deadline = time.monotonic() + seconds
        while self.step() < step:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def step(self) -> int:
        lines = self.records.read_text().splitlines() if self.records.is_file() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def ranks(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "matmix.launch.jobs.rank" in words and any(str(self.run) in word for word in words):
                    found.append(process)
        return [process for process in found if "matmix.launch.jobs.agent" not in process.cmdline()]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in self.ranks():
            process.kill()


LONG = ("--steps", "100000", "--evaluation.every", "0", "--checkpoint.every", "10")


@pytest.fixture
def local(dataset, tmp_path):
    run = Local(dataset, tmp_path, *LONG)
    yield run
    run.end()


@pytest.mark.slow
def test_ranks_listen_on_this_host_alone_and_sigterm_leaves_a_checkpoint(local, capsys):
    local.wait_for_step(3)
    ranks = local.ranks()
    family = [psutil.Process(local.process.pid), *psutil.Process(local.process.pid).children(recursive=True)]
    assert len(ranks) == 2
    addresses = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}  # gloo's; the ranks met without a server

    store, secret = Path(ranks[0].environ()["MATMIX_STORE"]), ranks[0].environ()["MATMIX_SECRET"]
    assert len(secret) == 32
    assert not any(secret in word for process in family for word in process.cmdline())
    assert store.stat().st_uid == os.getuid()
    assert store.parent.stat().st_mode & 0o777 == 0o700

    local.process.send_signal(signal.SIGTERM)
    assert local.process.wait(timeout=120) == EXIT_STOPPED, local.text()
    (attempt,) = read_attempts(local.run)
    assert attempt.stopped
    assert attempt.saved_step is not None
    assert attempt.saved_step >= 3
    assert (local.run / "checkpoints" / f"step-{attempt.saved_step:08d}" / "checkpoint.json").is_file()
    assert not local.ranks()
    assert "Traceback" not in local.text()

    assert main(["launch", "status", str(local.run)]) == 0
    shown = capsys.readouterr().out
    assert "ended" in shown
    assert "Stopped by" in shown
    assert f"step {attempt.saved_step} of 100000" in shown
    assert f"step-{attempt.saved_step:08d}" in shown
    assert main(["launch", "cancel", str(local.run)]) == 0
    assert "not running" in capsys.readouterr().out


@pytest.mark.slow
def test_phases_go_on_in_the_one_where_a_rank_was_killed(dataset, tmp_path, capsys):
    recipe = tmp_path / "phases.toml"
    recipe.write_text(
        find_recipe("debug_mru").read_text() + "\n[[phase]]\nsteps = 5\n[[phase]]\nsteps = 100000\ninit.resume = true\n"
    )
    local = Local(dataset, tmp_path, *LONG[2:], recipe=str(recipe))
    local.records = local.run / "phase-2" / "metrics.jsonl"
    try:
        local.wait_for_step(13)
        psutil.Process(local.ranks()[-1].pid).kill()
        local.wait_for_step(25)
        assert main(["launch", "cancel", str(local.run), "--grace", "120"]) == 0
        assert local.process.wait(timeout=60) == EXIT_STOPPED, local.text()
    finally:
        local.end()
    first, second = read_attempts(local.run)
    assert (first.phase, second.phase) == (2, 2)
    assert first.failed
    assert second.stopped
    steps = [json.loads(line)["step"] for line in local.records.read_text().splitlines()]
    assert steps == list(range(6, second.saved_step + 1))
    assert "Traceback" not in local.text()
    capsys.readouterr()
    assert main(["launch", "status", str(local.run)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\n  phase-1 +step 5 of 5, loss .*, finished, validation loss", shown)
    assert re.search(rf"\n  phase-2 +step {second.saved_step} of \d+, loss", shown)
    assert f"phase-2/checkpoints/step-{second.saved_step:08d}\n" in shown
    assert f"began step {second.saved_step} of phase 2\n" in shown


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not gone(processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_end_with_their_launcher(local):
    local.wait_for_step(3)
    family = [psutil.Process(local.process.pid), *psutil.Process(local.process.pid).children(recursive=True)]
    local.process.kill()
    wait_until_gone(family, seconds=60)  # they had a step to finish and to save
    assert "the launcher of this run is gone" in local.text()
    assert (local.run / "checkpoints").is_dir()


@pytest.mark.slow
def test_a_launcher_that_is_killed_early_leaves_no_rank(local):
    deadline = time.monotonic() + 60
    while len(ranks := local.ranks()) < 2:
        assert time.monotonic() < deadline, local.text()
        time.sleep(0.01)
    time.sleep(1)
    local.process.kill()
    wait_until_gone(ranks, seconds=2)


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(local, capsys):
    local.wait_for_step(13)
    psutil.Process(local.ranks()[-1].pid).kill()
    local.wait_for_step(40)
    assert main(["launch", "status", str(local.run)]) == 0
    assert "running" in capsys.readouterr().out
    assert main(["launch", "resubmit", str(local.run)]) == 2
    assert "still running" in capsys.readouterr().err
    assert main(["launch", "cancel", str(local.run), "--grace", "120"]) == 0
    assert local.process.wait(timeout=60) == EXIT_STOPPED, local.text()
    first, second = read_attempts(local.run)
    assert first.failed
    assert second.stopped
    assert "starting again" in local.text()
    assert "resumed from step-" in local.text()
    steps = [json.loads(line)["step"] for line in (local.run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, second.saved_step + 1))
    assert not local.ranks()
