"""A real Slurm cluster on this host: one slurmctld, a slurmd for every node, nothing outside one folder but sockets.

with Cluster.started(folder, {"main": 4}) as cluster:
    job = cluster.submit("#!/bin/sh\\nhostname\\n")
    cluster.wait_for(job, "COMPLETED")

It needs neither root nor munge nor systemd, takes free ports, and so runs beside other clusters.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
from slurm_setup import find_program, slurm_conf, why_unavailable

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

T = TypeVar("T")


def wait_until(check: Callable[[], T], what: str, seconds: float = 120, poll: float = 0.1) -> T:
    """The first true value of `check()`. Fails naming `what` (text) if there is none for `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(poll)


class Cluster:
    """A running cluster; make one with `Cluster.started`. Jobs are named by their ids, as text."""

    def __init__(self, folder: Path, partitions: Mapping[str, int], cpus: int) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.config)}
        self._asking, self._told, self._told_at = threading.Lock(), {}, 0.0
        self._daemons: dict[str, subprocess.Popen] = {}
        names = (f"node{number}" for number in range(1, 1 + sum(partitions.values())))
        self.nodes = {partition: [next(names) for _ in range(count)] for partition, count in partitions.items()}
        # Sockets lie in the spool folders, and a socket's path has 108 bytes at most.
        self.spool = Path(tempfile.mkdtemp(prefix="slurm-"))
        for name in (folder / "state", folder / "log", *(self.spool / node for node in self.all_nodes)):
            name.mkdir(parents=True)
        self.config.write_text(slurm_conf(folder, self.spool, self.nodes, cpus), encoding="utf-8")

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, partitions: Mapping[str, int], cpus: int = 4) -> Iterator[Cluster]:
        """A cluster with so many idle nodes in each partition, the first one being the default.

        A further partition, "urgent", has all nodes; its jobs preempt the others', which are requeued after 20 s.
        The nodes pretend to `cpus` CPUs. All that it started is gone at the end: daemons, steps and their tasks.
        """
        cluster = cls(Path(folder), partitions, cpus)
        try:
            cluster._start("slurmctld", "slurmctld", "-c", "-D")
            for node in cluster.all_nodes:
                cluster.start_node(node)
            cluster.wait_for_nodes("idle")
            yield cluster
        finally:
            cluster._stop()

    @property
    def all_nodes(self) -> list[str]:
        return [node for nodes in self.nodes.values() for node in nodes]

    # -- commands ------------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess:
        """Runs a command that talks to this cluster; its output is text."""
        options = {"env": self.environment, "timeout": 60, **options}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done

    def submit(self, script: str, *options: str) -> str:
        """Submits the text of a script and returns the job's id."""
        done = self.run("sbatch", "--parsable", "--chdir", str(self.folder), *options, input=script)
        return done.stdout.strip().split(";")[0]

    def info(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job (12) or a task of an array (12_0): JobState, Reason, Restarts,
        NodeList, StdOut and so on, as they were some tenths of a second ago."""
        with self._asking:
            if job not in self._told or time.monotonic() > self._told_at + 0.3:
                self._told, self._told_at = self._ask(), time.monotonic()
            return self._told[job]

    def _ask(self) -> dict[str, dict[str, str]]:
        lines = self.run("scontrol", "show", "job", "-o").stdout.splitlines()
        told = {}
        for line in lines:
            info = dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", line))
            if "ArrayJobId" in info:
                # Tasks that wait share a line: ArrayTaskId=1-3 or 0,2-3%1.
                for group in info["ArrayTaskId"].split("%")[0].split(","):
                    first, _, last = group.partition("-")
                    for task in range(int(first), int(last or first) + 1):
                        told[f"{info['ArrayJobId']}_{task}"] = info
            elif "JobId" in info:
                told[info["JobId"]] = info
        return told

    def wait_for(self, job: str, *states: str, restarts: int = 0, seconds: float = 120) -> dict[str, str]:
        """Waits until the job is in one of `states` and has been restarted that often; returns its info.

        Fails at once if the job ends in a state that is not awaited, showing the end of its output.
        """

        def there() -> dict[str, str] | None:
            info = self.info(job)
            if info["JobState"] in states and int(info["Restarts"]) >= restarts:
                return info
            ended = info["JobState"] in _ENDED
            assert not ended, f"job {job} ended {info['JobState']}: {self.output(job)[-3000:]}"
            return None

        return wait_until(there, f"job {job} to be {' or '.join(states)}, restarted {restarts} times", seconds)

    def wait_for_end(self, job: str, seconds: float = 240) -> dict[str, str]:
        """Waits until the job has ended for good, however it did."""
        return self.wait_for(job, *_ENDED, seconds=seconds)

    def output(self, job: str) -> str:
        """What the batch script and the first rank have printed so far."""
        path = Path(self.info(job)["StdOut"])
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    # -- nodes ---------------------------------------------------------------------------------------------------

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-N", node, "-D")

    def node_states(self) -> dict[str, str]:
        lines = self.run("sinfo", "--noheader", "-N", "-o", "%N %T").stdout.split()
        return dict(zip(lines[::2], lines[1::2], strict=True))

    def hostnames(self, nodes: str) -> list[str]:
        """["node1", "node3"] of "node[1,3]"."""
        return self.run("scontrol", "show", "hostnames", nodes).stdout.split()

    def wait_for_nodes(self, state: str, nodes: Sequence[str] | None = None, seconds: float = 60) -> None:
        nodes = self.all_nodes if nodes is None else nodes
        wait_until(
            lambda: all(self.node_states().get(node) == state for node in nodes), f"{nodes} to be {state}", seconds
        )

    def set_down(self, node: str) -> None:
        """What an operator, or Slurm itself, does with a broken node: its jobs are requeued at once."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def resume(self, node: str) -> None:
        """Brings a node back that was set down or killed."""
        if self._daemons[node].poll() is not None:
            self.start_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        self.wait_for_nodes("idle", [node])

    def kill_node(self, node: str) -> None:
        """As if its power failed: slurmd, the steps and all their tasks die at once; Slurm has to find out."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        _kill(self.processes(node))

    def find_processes(self, job: str, text: str) -> list[psutil.Process]:
        """The processes of a job's tasks whose command line holds `text`; not the srun that starts them."""
        found = []
        for process in self.processes():
            try:
                of_job = process.environ().get("SLURM_JOB_ID") == job and process.name() != "srun"
                found += [process] if of_job and text in " ".join(process.cmdline()) else []
            except psutil.Error:
                continue  # gone in the meantime
        return found

    def hears(self, job: str, number: signal.Signals) -> bool:
        """Whether the batch script of a job has come as far as to catch this signal, which would kill it before.

        Slurm says that a job runs before its script has done anything.
        """
        for process in self.find_processes(job, "slurm_script"):
            with contextlib.suppress(OSError):  # gone in the meantime
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
                if int(re.search(r"^SigCgt:\s*(\w+)$", status, re.M)[1], 16) >> (number - 1) & 1:
                    return True
        return False

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """The steps (slurmstepd) and tasks on one node or on all; without the daemons."""
        logs = {str(self.folder / "log" / f"slurmd-{name}.log") for name in ([node] if node else self.all_nodes)}
        daemons = {daemon.pid for daemon in self._daemons.values()}
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if process.pid in daemons or process.pid == os.getpid():
                    continue
                if process.name().startswith("slurmstepd"):  # hides its environment, keeps its node's log open
                    ours = any(file.path in logs for file in process.open_files())
                else:
                    # The tests' own helpers, as multiprocessing's tracker, may find the cluster, and are on no node.
                    environment = process.environ()
                    place = environment.get("SLURMD_NODENAME")
                    ours = environment.get("SLURM_CONF") == str(self.config) and place is not None
                    ours = ours and node in (None, place)
                if ours:
                    found[process.pid] = process
            except psutil.Error:
                continue  # gone in the meantime
        return list(found.values())

    # -- inside --------------------------------------------------------------------------------------------------

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = find_program(program)
        assert path is not None, why_unavailable()
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            # In the foreground, so that its end can be awaited; in a session of its own, so that Ctrl-C at the tests
            # does not end it before its jobs.
            self._daemons[name] = subprocess.Popen(
                [path, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _stop(self) -> None:
        """Kills the daemons, the controller first, so that nothing is requeued, and then what they had started."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        while processes := self.processes():
            _kill(processes)
        shutil.rmtree(self.spool, ignore_errors=True)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
