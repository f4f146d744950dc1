"""A rank whose launcher died before it could ask for that ends by itself; one that nobody launched does not."""

import os
import subprocess
import sys
import time

import pytest

from matmix.train.callbacks.housekeeping import LauncherGone
from matmix.train.process import launched

# Waits until its parent is gone, then begins as every process of ours does.
RANK = (
    "import os, sys, time\n"
    "while os.getppid() == int(sys.argv[1]): time.sleep(0.01)\n"
    "from matmix.train.process.console import begin_process\n"
    "begin_process()\n"
    "print('goes on', flush=True)\n"
)
PARENT = (
    "import os, subprocess, sys\n"
    f"subprocess.Popen([sys.executable, '-P', '-c', {RANK!r}, str(os.getpid())], env=os.environ)\n"
)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}


def start_orphan(**variables: str) -> str:
    """What a process says whose parent has died, with these variables; returns when it has ended."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MATMIX_LAUNCHER", *TORCHRUN)}
    command = [sys.executable, "-P", "-c", PARENT]
    return subprocess.run(
        command, env={**environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc")
def test_an_orphan_of_torchrun_ends_at_once():
    began = time.monotonic()
    assert start_orphan(**TORCHRUN) == "matmix: the launcher of this process is gone\n"
    assert time.monotonic() - began < 10


def test_an_orphan_of_our_launcher_ends_at_once():
    assert start_orphan(MATMIX_LAUNCHER="1234567") == "matmix: the launcher of this process is gone\n"


def test_a_process_that_a_person_starts_may_outlive_the_shell():
    assert start_orphan() == "goes on\n"


def test_a_launcher_that_dies_while_ranks_agree_to_stop_is_told_of_once(monkeypatch, told):
    """The kernel's signal may end the run before the callback's next step."""
    gone = LauncherGone()
    monkeypatch.setattr(launched, "is_gone", lambda: True)
    gone.on_end(run=None)
    gone.on_end(run=None)
    assert told == ["the launcher of this run is gone: the run saves and stops"]
