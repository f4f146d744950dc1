"""Starts one rank, `python -m matmix.launch.jobs.rank RECIPE [--key value ...]`: what must be right before torch is
imported, then `matmix train`."""

import contextlib
import faulthandler
import os
import socket
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from matmix.data.processes import threads_of_each
from matmix.train.process import console, launched, node_folders
from matmix.train.process.console import begin_training
from matmix.train.run.outcome import local_folder


def find_run_dir(arguments: Sequence[str]) -> str:
    """Returns the run directory that `matmix train` will find in these arguments, without the imports it needs."""
    for number, argument in enumerate(arguments):
        key, _, value = argument.partition("=")
        if key in ("--run-dir", "--run_dir"):
            return value or (arguments[number + 1] if number + 1 < len(arguments) else "")
    if arguments and "://" in arguments[0]:
        return arguments[0]
    recipe = Path(arguments[0]) if arguments else Path("run")
    if recipe.is_dir():
        return str(recipe)
    if recipe.is_file():
        # Where it cannot be read, `matmix train` says what is wrong.
        with contextlib.suppress(ValueError, OSError, RecursionError):
            named = tomllib.loads(recipe.read_text(encoding="utf-8-sig")).get("run_dir")
            if isinstance(named, str) and named:
                return named
    return f"runs/{recipe.stem}"


def log_path(run_dir: str, environment: Mapping[str, str]) -> Path:
    """Returns RUN/logs/<attempt>/rank-00003.log; of a run in an object store, in the folder this node has for it."""
    home = local_folder(run_dir, environment.get("GROUP_RANK") or 0)
    attempt = environment.get("MATMIX_ATTEMPT", "attempt")
    return home / "logs" / attempt / f"rank-{int(environment.get('RANK', '0')):05d}.log"


# -- environment -------------------------------------------------------------------------------------------------------


_SLURM_NODE = {launched.NODE_VARIABLE: "SLURMD_NODENAME", node_folders.DISK_VARIABLE: "SLURM_TMPDIR"}
_SLURM_PLACE = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "GROUP_RANK": "SLURM_NODEID",
}


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what Slurm says of this node and, under `srun` of several processes, those of torchrun's variables that
    the batch script does not set. A step smaller than the job is whole by itself. Raises ValueError."""
    node = {name: environment[source] for name, source in _SLURM_NODE.items() if environment.get(source)}
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return node
    step_tasks = environment.get("SLURM_STEP_NUM_TASKS")
    merged = {**environment, **({"SLURM_NTASKS": step_tasks} if step_tasks else {})}
    if missing := [name for name in _SLURM_PLACE.values() if name not in merged]:
        raise ValueError(f"SLURM_PROCID is set but {', '.join(missing)} is not: start the ranks with srun")
    place = {name: merged[source] for name, source in _SLURM_PLACE.items()}
    if place["WORLD_SIZE"] == "1":
        return node
    counts: list[int] = []  # of the ranks of each node, from "2(x3),1"
    for piece in (environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]).split(","):
        count, _, times = piece.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return {**node, **place, "LOCAL_WORLD_SIZE": str(counts[int(place["GROUP_RANK"])])}


_EVERYWHERE = {
    # Sequences of many lengths fragment the memory of a GPU; growing segments keep it whole.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Says why a connection failed; INFO writes thousands of lines.
    "NCCL_DEBUG": "WARN",
    # A rank whose peer has died ends instead of waiting for ever, so that the job can be started again.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # Keeps the last collectives of each rank, which tell who was late in a hang.
    "TORCH_FR_BUFFER_SIZE": "2000",
    # Writes them when a collective times out.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # torch's warnings on sockets that connect at a second try alarm for nothing.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def defaults(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the defaults of what is not set, for a rank that has torchrun's variables, and makes the folders of the
    caches. Raises ValueError where one that the user has named cannot be trusted."""
    # Kernels are compiled once per node: a home folder on a network drive is slow and its locks unreliable, and where
    # torch itself would keep them another user can be the first.
    chosen = node_folders.cache_variables(environment) | _EVERYWHERE
    chosen["OMP_NUM_THREADS"] = str(threads_of_each(int(environment.get("LOCAL_WORLD_SIZE", "1"))))
    world_size = environment.get("WORLD_SIZE", "1")
    one_host = environment.get("LOCAL_WORLD_SIZE") == world_size
    master = "127.0.0.1" if one_host else environment.get("MASTER_ADDR", "")
    if int(world_size) > 1 and master and (interface := interface_towards(master)):
        # gloo would take the address of the host's name, which on many systems is 127.0.1.1.
        chosen["GLOO_SOCKET_IFNAME"] = interface
        if one_host:  # nobody else is to reach the ranks
            chosen["NCCL_SOCKET_IFNAME"] = interface
    return {name: value for name, value in chosen.items() if name not in environment}


def way_to(host: str) -> tuple[str, str]:
    """Returns the address of this node from which its way to `host` begins, and that of `host`. Raises OSError where
    there is no way, socket.gaierror where `host` does not resolve."""
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the way and sends nothing
        return probe.getsockname()[0], target[0]


def interface_towards(host: str) -> str | None:
    """Returns the network interface whose address this node would use to reach `host`; None if there is no way."""
    import psutil

    try:
        own, _ = way_to(host)
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, all_of in interfaces if any(one.address.split("%")[0] == own for one in all_of)), None)


# -- the process -----------------------------------------------------------------------------------------------------


def write_output_to(path: Path) -> None:
    """Sends this process's stdout and stderr, also those of C code, to the end of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    console.job_output = os.fdopen(os.dup(2), "w", buffering=1)
    with path.open("ab", buffering=0) as log:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log.fileno(), number)


def main() -> int:
    """Entry point; returns the exit code of `matmix train`."""
    faulthandler.enable()
    arguments = sys.argv[1:]

    def become_rank() -> None:
        os.environ.update(rank_variables(os.environ))
        os.environ.update(defaults(os.environ))
        log = log_path(find_run_dir(arguments), os.environ)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            with contextlib.suppress(OSError):  # then each rank says its errors itself
                console.share(log.parent)
        if os.environ.get("RANK", "0") != "0":
            write_output_to(log)

    if code := begin_training(become_rank):
        return code
    from matmix.train.entry import main as train

    return train(arguments)


if __name__ == "__main__":
    sys.exit(main())
