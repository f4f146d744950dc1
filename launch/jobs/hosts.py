"""`matmix launch local` and `launch torchrun`: a run on this host, and this node's part of one without a scheduler."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from matmix.data.artifacts import shell_line
from matmix.data.storage.files import first_free
from matmix.launch.jobs import attempts, launches, processes
from matmix.launch.jobs.launches import Job
from matmix.launch.jobs.processes import check_counts, environment_for, rank_command, stop_requests
from matmix.launch.jobs.rank import way_to
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.errors import RendezvousError
from matmix.train.process.exits import EXIT_FAILED, EXIT_INTERRUPTED
from matmix.train.process.launched import wait_for_port
from matmix.train.run.outcome import attempt_id

if TYPE_CHECKING:
    from matmix.train.config import RunConfig

# Nodes of one start wait this long for each other, so that with all imports a missing one costs less than a minute;
# torchrun's own 600 s is a long time for a mistyped address.
_JOIN_SECONDS = 35
_ENDPOINT = re.compile(r"(?:\[(?P<address>[^\[\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ranks:
    recipe: Recipe = ""
    """Path, run directory, or name of a bundled recipe."""
    nproc: int
    """Processes on this host, one a GPU."""
    dry_run: bool = False
    """Print what would run, and run nothing."""

    def read_phases(self, rest: Sequence[str], ranks: int) -> list[RunConfig]:
        from matmix.launch.jobs.slurm.submit import checked  # imports torch, and --help should not
        from matmix.train.config import RunConfig
        from matmix.train.recipe import load_phases

        check_overrides(self, rest, RunConfig)
        return checked(load_phases(self.recipe, rest), ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(_Ranks):
    """Run a recipe on this host, a process for each GPU, and start it again after failures as a cluster would.

    Ctrl-C saves and ends the run; the same command goes on from there.
    """

    max_restarts: int = attempts.DEFAULT_MAX_REQUEUES
    """How often a failed run is started again without having got further, as --max-requeues of slurm; 0 = never."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Checks the config, writes RUN/launch/<id>/ and runs it. Raises ValueError for the user's mistakes."""
        from matmix.launch.jobs.slurm.submit import note_run  # imports torch, and --help should not
        from matmix.train.recipe import run_dir_of, write_phases

        check_counts(self, "nproc")
        phases = self.read_phases(rest, self.nproc)
        home = launches.launch_home(run_dir_of(phases))
        launch, command = launches.new_launch_id(home), list(typed)
        job = Job(kind="local", launch=launch, command=command, nproc=self.nproc, max_restarts=self.max_restarts)
        folder = home / "launch" / launch
        if self.dry_run:
            _show(self.nproc, rank_command([str(folder / "config.toml")]))
            return 0
        launches.take_snapshot(folder)
        write_phases(phases, folder / "config.toml")
        note_run(home, phases)
        return run_local(home, job)


def _show(nproc: int, command: Sequence[str]) -> None:
    print(f"{nproc} x {shell_line(*command)}", flush=True)


def run_local(home: Path, job: Job) -> int:
    """Attempts until the run has finished, stopped, or failed once too often; returns the exit code of the last."""
    launches.add_job(home, dataclasses.replace(job, time=time.time(), pid=os.getpid(), host=socket.gethostname()))
    folder = home / "launch" / job.launch
    command = rank_command([str(folder / "config.toml")])
    _show(job.nproc, command)
    # Attempts are called after the launch, with -again-2 and so on where it is run again.
    used = {attempts.job_of(attempt.attempt) for attempt in attempts.read_attempts(home)}
    start = first_free(Path(job.launch), lambda name: str(name) in used, "-again-")
    with stop_requests() as requests:
        for number in itertools.count():
            name = f"{start}.{number}"
            environment = environment_for(job.nproc, name)
            paths = [str(folder / "code"), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            attempts.begin(home, name, socket.gethostname())
            code = processes.run_ranks(command, job.nproc, environment, requests)
            ends = {"signalled": bool(requests), "ending": "it was told to stop" if requests else ""}
            attempt, decision = attempts.conclude(home, name, code, max_requeues=job.max_restarts, **ends)
            if not decision.again:
                break
            print(f"attempt {name}: starting again: {decision.why}", flush=True)
    if attempt.failed:
        print(f"attempt {name}: {decision.why}", flush=True)
    code = EXIT_INTERRUPTED if processes.is_at_once(requests) else attempt.code
    return EXIT_FAILED if code is None else code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torchrun(_Ranks):
    """Run this node's part of a recipe under torchrun; start the same command on every node."""

    nnodes: int
    """Nodes; this command runs on each."""
    rdzv: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")]
    """Where the nodes meet: one of them, by name."""
    node_rank: int | None = None
    """Number of this node, 0 on HOST; without, as the nodes arrive."""
    rdzv_id: str | None = None
    """Name under which the nodes meet, the same on all; default: the run's."""
    local_addr: str | None = None
    """This node's address for the others; default: the one that leads to HOST."""

    def run(self, rest: list[str], typed: Sequence[str]) -> int:
        """Runs this node's part; signals make the ranks save. Returns the exit code of the rank that failed first."""
        from matmix.train.recipe import run_dir_of  # imports torch, and --help should not

        check_counts(self, "nproc", "nnodes")
        host, port = parse_endpoint(self.rdzv)
        run_dir = run_dir_of(self.read_phases(rest, self.nnodes * self.nproc))
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank must lie between 0 and {self.nnodes - 1}, got {self.node_rank}")
        # To show the command needs no network.
        local_addr = self.local_addr or ("ADDRESS-OF-THIS-NODE" if self.dry_run else address_here(host))
        arguments = [self.recipe, *rest]
        alone = self.nnodes == 1  # there is nobody to meet: neither an agent nor a store on the network is needed
        words = [*self.words(host, port, local_addr, run_dir), *arguments]
        if alone:
            _show(self.nproc, rank_command(arguments))
        else:
            print(shell_line("torchrun", *words), flush=True)
        if self.dry_run:
            return 0
        environment = environment_for(self.nproc, attempt_id())
        if not alone and (local_addr != host if self.node_rank is None else self.node_rank):
            wait_for_host(host, port)
        with stop_requests() as requests:
            if alone:
                return processes.run_ranks(rank_command(arguments), self.nproc, environment, requests)
            agent = [sys.executable, "-m", "matmix.launch.jobs.agent", *words]
            return processes.run_agent(agent, environment, requests)

    def words(self, host: str, port: int, local_addr: str, run_dir: str) -> list[str]:
        """Returns torchrun's arguments for this node, before those of the ranks."""
        shown = f"[{host}]" if ":" in host else host
        run_id = re.sub(r"[^A-Za-z0-9._-]+", "-", self.rdzv_id or Path(run_dir).name).strip(".-") or "run"
        words = [f"--nnodes={self.nnodes}", f"--nproc-per-node={self.nproc}", "--max-restarts=0", f"--rdzv-id={run_id}"]
        if self.node_rank is None:
            conf = f"join_timeout={_JOIN_SECONDS},read_timeout={_JOIN_SECONDS}"
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={shown}:{port}", f"--rdzv-conf={conf}"]
        else:
            words += ["--rdzv-backend=static", f"--master-addr={host}", f"--master-port={port}"]
            words += [f"--node-rank={self.node_rank}", f"--rdzv-conf=timeout={_JOIN_SECONDS}"]
        return [*words, f"--local-addr={local_addr}", "-m", processes.RANK_MODULE]


def parse_endpoint(text: str) -> tuple[str, int]:
    """Reads HOST:PORT, HOST, or [IPv6]:PORT as (host, port). Raises ValueError."""
    endpoint = _ENDPOINT.fullmatch(text)
    port = int(endpoint["port"] or 29400) if endpoint else 0
    if endpoint is None or not 0 < port < 65536:
        raise ValueError(f"--rdzv takes HOST:PORT or [IPv6 address]:PORT with a port between 1 and 65535, got {text!r}")
    return endpoint["address"] or endpoint["host"], port


def address_here(host: str) -> str:
    """Returns an address of this node that the other nodes can reach: on the node that `host` names, that name, else
    the address from which the way to `host` begins. Raises ValueError if `host` does not resolve."""
    try:
        own, other = way_to(host)
    except socket.gaierror as error:
        raise ValueError(f"--rdzv: {host} does not resolve here ({error.strerror}); give an address") from None
    except OSError as error:
        raise ValueError(f"--rdzv: there is no way from here to {host} ({error.strerror})") from None
    return host if ipaddress.ip_address(own) == ipaddress.ip_address(other) else own


def wait_for_host(host: str, port: int, seconds: float = _JOIN_SECONDS) -> None:
    """Returns when the node where the others meet answers. Raises RendezvousError (one line) if it does not."""
    try:
        wait_for_port(host, port, seconds)
    except OSError as error:
        where = f"{host} port {port} did not answer within {seconds:.0f} s ({error.strerror or error})"
        check = f"is the same command running on {host}, and does no firewall close the port?"
        raise RendezvousError(f"{where}: {check}") from None
