"""Starts one rank: `python -m matmix.launch.jobs.rank RECIPE [--key value ...]`.

Everything that must be right before torch is imported happens here: who this rank is (torchrun's variables, or
Slurm's), the environment's defaults, where its output goes. Then it is `matmix train`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from matmix.launch.jobs.environment import defaults
from matmix.launch.jobs.slurm.rank import rank_variables
from matmix.train.process import console, once
from matmix.train.process.begin import begin_training
from matmix.train.run.outcome import local_folder


def find_run_dir(arguments: Sequence[str]) -> str:
    """The run directory that `matmix train` will find in these arguments, without the imports that it needs."""
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
    """RUN/logs/<attempt>/rank-00003.log; for a run in an object store, in the folder that this node has for it."""
    home = local_folder(run_dir, environment.get("GROUP_RANK") or 0)
    attempt = environment.get("MATMIX_ATTEMPT", "attempt")
    return home / "logs" / attempt / f"rank-{int(environment.get('RANK', '0')):05d}.log"


def write_output_to(path: Path) -> None:
    """Sends this process's stdout and stderr, also those of C code, to the end of `path`.

    What commands print about errors (`matmix.train.process.console.report`) still goes to the job's output as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    console.job_output = os.fdopen(os.dup(2), "w", buffering=1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, number)
    os.close(log)


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
                once.share(log.parent)
        if os.environ.get("RANK", "0") != "0":
            write_output_to(log)

    if code := begin_training(become_rank):
        return code
    from matmix.train.entry import main as train

    return train(arguments)


if __name__ == "__main__":
    sys.exit(main())
