"""`matmix launch`: starts runs on one host, under torchrun, or with Slurm, and looks after them."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from matmix.launch import slurm_options
from matmix.launch.slurm_options import SlurmOptions
from matmix.train.arguments import field_names
from matmix.train.config import RunConfig

_USAGE = """\
usage: matmix launch KIND ...   (matmix launch KIND --help explains each)

  local RECIPE --nproc 4 [--key value ...]                    on this host, with torchrun; starts again after failures
  torchrun RECIPE --nnodes 2 --nproc 8 --rdzv HOST:PORT ...   this node's part; the same command on every node
  slurm RECIPE --nodes 16 --gpus-per-node 8 ...               as a Slurm job (--dry-run prints its script)
  status RUN      what the run is doing
  cancel RUN      saves it, then ends its jobs
  resubmit RUN    the last launch again: same code, same config

RECIPE and --key value are those of `matmix train`.
"""


class Parser(argparse.ArgumentParser):
    """Its errors are ours: one line."""

    def __init__(self, *words: str, **options: object) -> None:
        super().__init__(*words, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help explains)")


def split_recipe(arguments: Sequence[str], prog: str) -> tuple[str, list[str]]:
    """The recipe, which comes first as in `matmix train`, and the rest. Raises ValueError without one."""
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(f"no recipe given: {prog} RECIPE [--key value ...]")
    return arguments[0], list(arguments[1:])


def check_overrides(parser: argparse.ArgumentParser, overrides: Sequence[str]) -> None:
    """Raises ValueError for a key that neither the launcher nor a recipe has, naming the nearest of both."""
    fields = {name.replace("_", "-") for name in field_names(RunConfig)}
    flags = {flag.lstrip("-") for flag in parser._option_string_actions}
    for word in overrides:
        key = word[2:].split("=", 1)[0].replace("_", "-")
        if word.startswith("--") and key not in fields:
            near = difflib.get_close_matches(key, sorted(fields | flags), n=1, cutoff=0.0)
            raise ValueError(f'unknown option "--{key}"; the nearest known one is "--{near[0]}"')


def _slurm(arguments: list[str]) -> int:
    from matmix.launch import slurm
    from matmix.launch.profiles import load_profile
    from matmix.launch.sweep import parse_sweep

    parser = Parser(prog="matmix launch slurm", usage="matmix launch slurm RECIPE [options] [--key value ...]")
    slurm_options.add_arguments(parser)
    parser.add_argument("--profile", metavar="NAME", help="site profile (~/.config/matmix/clusters.toml)")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=V,V", help="a job array over these values")
    parser.add_argument("--sweep-file", metavar="FILE", help="a job array over the [[run]] tables of a TOML file")
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    if {"-h", "--help"} & set(arguments):
        parser.parse_args(["--help"])
    recipe, rest = split_recipe(arguments, parser.prog)
    given, overrides = parser.parse_known_args(rest)
    check_overrides(parser, overrides)
    profile = load_profile(given.profile)
    if address := os.environ.get("MATMIX_MASTER_ADDR"):
        profile["master_addr"] = address
    options: SlurmOptions = slurm_options.from_layers(profile, vars(given))
    points = parse_sweep(given.sweep, given.sweep_file)
    plan = slurm.plan_launch(recipe, overrides, points, options, ["launch", "slurm", *arguments])
    script = slurm.render_launch(plan)
    if given.dry_run:
        print(script, end="")
        return 0
    job = slurm.submit_launch(plan, script)
    log = plan.home / "logs" / (f"slurm-{job.job}_*.out" if job.tasks else f"slurm-{job.job}.out")
    what = f"job {job.job}" + (f" ({job.tasks} tasks)" if job.tasks else "")
    print(f"Submitted {what}: {plan.folder / 'job.sbatch'}")
    print(f"Follow it:  matmix launch status {plan.home}   or   tail -F {log}")
    print(f"End it:     matmix launch cancel {plan.home}   (saves first)")
    return 0


KINDS: dict[str, Callable[[list[str]], int]] = {
    "slurm": _slurm,
}


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code. Raises ValueError (one line) for the user's mistakes."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] not in KINDS:
        near = difflib.get_close_matches(arguments[0], KINDS, n=1, cutoff=0.0)
        raise ValueError(f'unknown kind of launch "{arguments[0]}"; the nearest is "{near[0]}" ({", ".join(KINDS)})')
    return KINDS[arguments[0]](arguments[1:])
