"""Batch scripts take decisions from single words of Slurm's, which no path of a run can reach; nothing of it is run.

The scripts are those of `matmix launch slurm`, run by bash; Slurm's commands are stand-ins that show what they get.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from matmix.launch.cli import main
from matmix.launch.jobs.slurm import scheduler

# What a name may be that somebody proposes: fields of Slurm's, arithmetic of bash, expansions, quotes.
HOSTILE = {
    "arithmetic": "x TimeLimit=1+a[$(touch MARKER)]",
    "run time": "RunTime=a[$(touch MARKER)]",
    "state": "x JobState=COMPLETED ",
    "address": "x NodeAddr=$(touch MARKER)",
    "shell": "'; touch MARKER; `touch MARKER` $(touch MARKER) \"$(touch MARKER)",
}

# `scontrol show job` as Slurm prints it: paths last, as they are.
SCONTROL = """
case "$*" in
  *"show job"*) printf 'JobId=7 JobName=x JobState=RUNNING Reason=None RunTime=00:00:10 TimeLimit=01:00:00 '
    printf 'Command=%s/job.sbatch WorkDir=%s StdOut=%s/logs/slurm-7.out\\n' "$RUN" "$RUN" "$RUN" ;;
  *"show hostnames"*) echo no-such-node ;;
  requeue*) echo "$*" >> "$CALLS" ;;
esac
"""
COMMANDS = {
    "scontrol": SCONTROL,
    "squeue": 'echo "$SAYS"',
    "sinfo": 'echo "${ADDRESS:-10.0.0.7}"',
    "srun": 'echo "rank 0 at $MASTER_ADDR" >> "$CALLS"; exit "$CODE"',
    "scancel": "",
    "sleep": "",
    "getent": "exit 2",
}


@pytest.fixture
def cluster(tmp_path, monkeypatch, capsys):
    """`cluster(name, says, code)`: runs the job of a run with this name; (what was called, output). Nothing in its
    name may have run."""
    marker, calls, bin_folder = tmp_path / "marker", tmp_path / "calls", tmp_path / "bin"
    monkeypatch.setenv("MATMIX_CLUSTERS", str(tmp_path / "clusters.toml"))
    monkeypatch.delenv("MATMIX_MASTER_ADDR", raising=False)
    (tmp_path / "clusters.toml").write_text("")
    bin_folder.mkdir()
    for name, text in COMMANDS.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_folder / name).chmod(0o755)

    def call(name: str, says: str = "RUNNING 1:00:00 0:10", code: int = 1, **more: str) -> tuple[str, str]:
        # A name is one part of a path: the marker is made where the script runs.
        run = tmp_path / "runs" / name.replace("MARKER", "marker")
        assert main(["launch", "slurm", "debug_mru", "--run-dir", str(run), "--tasks-per-node", "1", "--dry-run"]) == 0
        calls.write_text("")
        done = subprocess.run(
            ["bash", "-c", capsys.readouterr().out],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **os.environ,
                "PATH": f"{bin_folder}:{os.environ['PATH']}",
                "CALLS": str(calls),
                "RUN": str(run),
                "SAYS": says,
                "CODE": str(code),
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n1",
                **more,
            },
        )
        assert not marker.exists(), done.stderr
        assert not list(tmp_path.glob("marker*"))
        return calls.read_text(), done.stdout + done.stderr

    return call


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_name_of_a_run_is_run_or_believed(name, cluster):
    called, output = cluster(name)
    assert "requeue 7" in called, output  # it failed for the first time, and Slurm says that it is running
    assert "rank 0 at 10.0.0.7" in called


@pytest.mark.parametrize(
    ("says", "again"),
    [
        ("RUNNING UNLIMITED 3-01:00:00", True),
        ("COMPLETING 1:00:00 0:10", False),  # cancelled, preempted: Slurm's to answer
        ("COMPLETING 1:00 1:01", True),  # at the time limit
        ("", False),  # nothing is known
        ("RUNNING a[$(touch marker)] 0:10", True),
        ("COMPLETING 1+a[$(touch marker)] a[$(touch marker)]", False),
    ],
)
def test_what_slurm_says_decides(says, again, cluster):
    called, output = cluster("plain", says)
    assert ("requeue 7" in called) == again, output


def test_a_finished_run_is_not_started_again(cluster):
    called, output = cluster("plain", code=0)
    assert "requeue" not in called, output


def test_other_variables_of_slurm_are_words_of_digits_or_nothing(cluster):
    called, output = cluster(
        "plain", ADDRESS="$(touch marker)", SLURM_RESTART_COUNT="a[$(touch marker)]", SQUEUE_STATES="PD"
    )
    assert "rank 0 at no-such-node" in called, output


def test_states_of_jobs_come_without_names(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/bash\n"
        f"for word; do case $word in --format=*) printf '%s\\n' {shlex.quote(_LINES)};; "
        "--Format=*) printf '7_0 2\\n7_1 0\\n';; esac; done\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first, second = scheduler.job_states("7")
    assert (first.job, first.state, first.restarts, first.reason) == ("7_0", "RUNNING", 2, "None")
    assert (second.state, second.nodes, second.reason) == ("PENDING", "", "odd|reason")
    source = Path(scheduler.__file__).read_text()
    assert "%j" not in source  # the job's name
    assert "%Z" not in source  # its folder


_LINES = "7_0|RUNNING|1:00:00|0:10|2026-11-22T10:00:00|n1|None\n7_1|PENDING|1:00:00|0:00|N/A||odd|reason"
