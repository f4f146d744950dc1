"""Signals between launcher, agent and ranks, with real processes. The agent and the ranks are small stand-ins."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from failures import each

from matmix.launch.cli import main
from matmix.launch.jobs import processes
from matmix.launch.jobs.hosts import Torchrun, address_here, parse_endpoint, wait_for_host
from matmix.train.errors import RendezvousError

# A rank that takes a second to save (a minute where the folder says so), as if it were torch's worker: named in its
# command line.
RANK = """
import pathlib, signal, sys, time
from matmix.train.process.launched import follow_launcher
follow_launcher()
folder, number = pathlib.Path(sys.argv[2]), sys.argv[3]
told = []
signal.signal(signal.SIGUSR2, lambda *_: told.append(1))
(folder / f"started-{number}").touch()
while not told:
    time.sleep(0.02)
time.sleep(60 if (folder / "slow").exists() else 1)
(folder / f"saved-{number}").write_text(str(len(told)))
sys.exit(75)
"""

# Starts two ranks, each in a session of its own as torch does, and ends with the worst of their codes.
AGENT = f"""
import os, pathlib, signal, subprocess, sys
from matmix.train.process.launched import follow_launcher
follow_launcher()
os.environ["MATMIX_LAUNCHER"] = str(os.getpid())
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / "agent-told").touch())
words = [sys.executable, "-c", {RANK!r}, "matmix.launch.jobs.rank", str(folder)]
ranks = [subprocess.Popen([*words, str(number)], start_new_session=True) for number in range(2)]
codes = [rank.wait() for rank in ranks]
sys.exit(max(map(abs, codes)))
"""

LAUNCHER = f"""
import os, sys
from matmix.launch.jobs.processes import run_agent, stop_requests
with stop_requests() as requests:
    sys.exit(run_agent([sys.executable, "-c", {AGENT!r}, sys.argv[1]], os.environ, requests))
"""


def wait_until(check, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def launcher(tmp_path):
    """A launcher whose agent and two ranks are running; all are gone after the test."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], start_new_session=True)
    try:
        wait_until(lambda: (tmp_path / "started-0").exists() and (tmp_path / "started-1").exists())
        yield process
    finally:
        for left in [process, *own_processes(tmp_path)]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                left.kill()
        process.wait()


def own_processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_ranks_are_told_once_and_have_time_to_save(number, launcher, tmp_path):
    launcher.send_signal(number)
    time.sleep(0.5)
    launcher.send_signal(number if number != signal.SIGINT else signal.SIGTERM)
    assert launcher.wait(timeout=60) == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert not (tmp_path / "agent-told").exists()
    assert not own_processes(tmp_path)


def test_a_second_ctrl_c_waits_for_nobody(launcher, tmp_path):
    (tmp_path / "slow").touch()
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == signal.SIGKILL
    assert not (tmp_path / "saved-0").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent has died")
def test_agent_and_ranks_end_with_a_launcher_that_is_killed(launcher, tmp_path):
    launcher.kill()
    wait_until(lambda: not own_processes(tmp_path), seconds=2)


def test_ranks_do_not_outlive_an_agent_that_is_killed(launcher, tmp_path):
    (agent,) = [process for process in psutil.Process(launcher.pid).children() if str(tmp_path) in process.cmdline()]
    agent.kill()
    assert launcher.wait(timeout=60) == 128 + signal.SIGKILL
    wait_until(lambda: not own_processes(tmp_path))
    assert not (tmp_path / "saved-0").exists()


def test_what_nobody_fetches_is_not_waited_for():
    """As in containers whose first process fetches no orphans."""
    script = f"{processes._MARK}=ours sleep 100 & echo $!; exec sleep 100"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        orphan = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: orphan.name() == "sleep")  # its shell had another environment
        started = time.monotonic()
        try:
            processes._end_marked("ours")
            assert time.monotonic() - started < 5
            assert orphan.status() == psutil.STATUS_ZOMBIE
            assert parent.poll() is None
        finally:
            parent.kill()


# -- torchrun's arguments ---------------------------------------------------------------------------------------------


@each(
    "text, endpoint",
    [
        ("node1:1234", ("node1", 1234)),
        ("node1", ("node1", 29400)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:29401", ("::1", 29401)),
        ("[fe80::1]", ("fe80::1", 29400)),
    ],
)
def test_endpoints(text, endpoint):
    assert parse_endpoint(text) == endpoint


@each("text", ["", ":1", "node1:", "node1:port", "node1:70000", "::1", "[::1", "[::1]29400"])
def test_endpoints_that_are_none(text):
    with pytest.raises(ValueError, match="--rdzv"):
        parse_endpoint(text)


def test_the_node_that_is_named_uses_the_name_it_is_known_by():
    assert address_here("127.0.0.1") == "127.0.0.1"
    assert address_here("localhost") == "localhost"
    with pytest.raises(ValueError, match="does not resolve"):
        address_here("no-such-node.invalid")


def test_ipv6_and_fixed_ranks():
    words = Torchrun(nnodes=2, nproc=4, rdzv="").words("::1", 29401, "::1", "runs/a")
    assert "--rdzv-endpoint=[::1]:29401" in words
    assert words[-2:] == ["-m", "matmix.launch.jobs.rank"]
    fixed = Torchrun(nnodes=2, nproc=4, rdzv="", node_rank=1).words("n", 1, "n", "runs/a")
    assert {"--node-rank=1", "--master-addr=n", "--master-port=1", "--rdzv-backend=static"} <= set(fixed)


def test_a_host_that_does_not_answer_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"127.0.0.1 port {port} did not answer .*refused"):
            wait_for_host("127.0.0.1", port, seconds=0.5)
        unused.listen()
        wait_for_host("127.0.0.1", port, seconds=5)


def test_to_print_the_command_of_a_node_needs_no_network(capsys):
    words = ["--nnodes", "2", "--nproc", "1", "--rdzv", "gpu01.invalid:29400", "--dry-run"]
    assert main(["launch", "torchrun", "debug_mru", *words]) == 0
    printed = capsys.readouterr().out
    assert "--rdzv-endpoint=gpu01.invalid:29400" in printed
    assert "--local-addr=ADDRESS-OF-THIS-NODE" in printed


def test_the_command_of_a_node_is_printed(capsys):
    words = ["--nnodes", "2", "--nproc", "2", "--rdzv", "[::1]:29401", "--dry-run", "--run-dir", "runs/a b"]
    assert main(["launch", "torchrun", "debug_mru", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("torchrun --nnodes=2 --nproc-per-node=2 ")
    assert "--rdzv-id=a-b" in printed
    assert printed.endswith("-m matmix.launch.jobs.rank debug_mru --run-dir 'runs/a b'\n")
    assert main(["launch", "torchrun", "debug_mru", "--nnodes", "3", *words[2:]]) == 2
    assert "does not divide" in capsys.readouterr().err


# Prints the name that the ranks of a start are given, in place of starting them.
NAMER = """
import sys
from matmix.launch.cli import main
from matmix.launch.jobs import processes
processes.run_ranks = lambda command, nproc, environment, requests: print(environment["MATMIX_ATTEMPT"])
processes.run_agent = lambda command, environment, requests: print(environment["MATMIX_ATTEMPT"])
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nnodes", ["1", "2"])
def test_each_start_has_a_name_of_its_own(nnodes, tmp_path):
    words = ["launch", "torchrun", "debug_mru", "--nnodes", nnodes, "--nproc", "1", "--rdzv", "127.0.0.1"]
    words += ["--rdzv-id", "same", "--run-dir", str(tmp_path)]
    starts = [subprocess.check_output([sys.executable, "-c", NAMER, *words], text=True) for _ in range(2)]
    first, second = (printed.splitlines()[-1] for printed in starts)
    assert first != second
