"""`matmix launch`: starts runs on one host, under torchrun, or with Slurm, and looks after them."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from matmix.launch.jobs.slurm import options as slurm_options
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.parser import Parser as AnyParser

_USAGE = """\
usage: matmix launch KIND ...   (matmix launch KIND --help explains each)

  local RECIPE --nproc 4 [--key value ...]                    on this host; starts again after failures
  torchrun RECIPE --nnodes 2 --nproc 8 --rdzv HOST:PORT ...   this node's part; the same command on every node
  slurm RECIPE --nodes 16 --gpus-per-node 8 ...               as a Slurm job (--dry-run prints its script)
  status RUN      what the run is doing
  cancel RUN      saves it, then ends its jobs
  resubmit RUN    the last launch again: same code, same config

RECIPE and --key value are those of `matmix train`.
"""


class Parser(AnyParser):
    """Takes no abbreviations: what it does not know goes on to the recipe."""

    def __init__(self, *words: str, **options: object) -> None:
        super().__init__(*words, allow_abbrev=False, **options)  # type: ignore[arg-type]


def split_recipe(arguments: Sequence[str], prog: str) -> tuple[str, list[str]]:
    """The recipe, which comes first as in `matmix train`, and the rest. Raises ValueError without one."""
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(f"no recipe given: {prog} RECIPE [--key value ...]")
    return arguments[0], list(arguments[1:])


def check_overrides(parser: argparse.ArgumentParser, overrides: Sequence[str]) -> None:
    """Raises ValueError for a key that neither the launcher nor a recipe has, naming the nearest of both."""
    from matmix.train.arguments import field_names
    from matmix.train.config import RunConfig

    fields = {name.replace("_", "-") for name in field_names(RunConfig)}
    flags = {flag.lstrip("-") for flag in parser._option_string_actions}
    for word in overrides:
        key = word[2:].split("=", 1)[0].replace("_", "-")
        if word.startswith("--") and key not in fields:
            near = difflib.get_close_matches(key, sorted(fields | flags), n=1, cutoff=0.0)
            raise ValueError(f'unknown option "--{key}"; the nearest known one is "--{near[0]}"')


def _slurm(arguments: list[str]) -> int:
    from matmix.launch.jobs.slurm import submit as slurm
    from matmix.launch.jobs.sweep import parse_sweep

    if "--prepare" in arguments:
        return _prepare(arguments)
    parser = Parser(prog="matmix launch slurm", usage="matmix launch slurm RECIPE [options] [--key value ...]")
    slurm_options.add_arguments(parser)
    parser.add_argument("--profile", metavar="NAME", help="site profile (~/.config/matmix/clusters.toml)")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=V,V", help="a job array over these values")
    parser.add_argument("--sweep-file", metavar="FILE", help="a job array over the [[run]] tables of a TOML file")
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    parser.add_argument(
        "--prepare", action="store_true", help="prepare data: --parts N and `matmix prepare`'s arguments"
    )
    recipe, given, overrides = _read(parser, arguments)
    options = slurm_options_of(given)
    points = parse_sweep(given.sweep, given.sweep_file)
    plan = slurm.plan_launch(recipe, overrides, points, options, ["launch", "slurm", *arguments])
    script = slurm.render_launch(plan)
    if given.dry_run:
        print(script, end="")
        return 0
    job = slurm.submit_launch(plan, script)
    log = shlex.quote(str(plan.home / "logs" / f"slurm-{job.job}")) + ("_*.out" if job.tasks else ".out")
    what = f"job {job.job}" + (f" ({job.tasks} tasks)" if job.tasks else "")
    print(f"Submitted {what}: {plan.folder / 'job.sbatch'}")
    home = shlex.quote(str(plan.home))
    print(f"Follow it:  matmix launch status {home}   or   tail -F {log}")
    print(f"End it:     matmix launch cancel {home}   (saves first)")
    return 0


def slurm_options_of(given: argparse.Namespace) -> SlurmOptions:
    from matmix.launch.jobs.profiles import load_profile

    profile = load_profile(given.profile)
    if address := os.environ.get("MATMIX_MASTER_ADDR"):
        profile["master_addr"] = address
    return slurm_options.from_layers(profile, vars(given))


def _prepare(arguments: list[str]) -> int:
    from matmix.launch.jobs.slurm import prepare as slurm_prepare

    usage = "matmix launch slurm --prepare --parts N INPUT ... --out DIR [options] [--key value ...]"
    parser = Parser(prog="matmix launch slurm --prepare", usage=usage)
    parser.add_argument("--prepare", action="store_true", help="prepare data; without it a recipe is trained")
    parser.add_argument("--parts", type=int, required=True, metavar="N", help="tasks of the array, one part each")
    slurm_options.add_arguments(parser)
    parser.add_argument("--profile", metavar="NAME", help="site profile (~/.config/matmix/clusters.toml)")
    parser.add_argument("--dry-run", action="store_true", help="print the scripts; write and submit nothing")
    given, rest = parser.parse_known_args(arguments)
    command = ["launch", "slurm", *arguments]
    plan = slurm_prepare.plan_preparation(rest, given.parts, slurm_options_of(given), command)
    scripts = slurm_prepare.render_preparation(plan)
    if given.dry_run:
        print("\n".join(scripts.values()), end="")
        return 0
    parts, merge = slurm_prepare.submit_preparation(plan, scripts)
    print(f"Submitted {given.parts} parts as job {parts.job}, and job {merge.job} that joins them")
    out, logs = shlex.quote(plan.config.out), shlex.quote(str(plan.home / "logs" / f"slurm-{parts.job}"))
    print(f"Follow it:  matmix launch status {out}   or   tail -F {logs}_*.out")
    print(f"Failed parts are made again by: matmix launch resubmit {out}")
    return 0


def _status(arguments: list[str]) -> int:
    from matmix.launch.jobs.records import find_home
    from matmix.launch.jobs.status import status_lines

    parser = Parser(prog="matmix launch status", description="Jobs, attempts, progress, checkpoint and logs of a run.")
    parser.add_argument("run", metavar="RUN", help="directory of a run, a sweep or a prepared dataset")
    print("\n".join(status_lines(find_home(parser.parse_args(arguments).run))))
    return 0


def _cancel(arguments: list[str]) -> int:
    from matmix.launch.jobs.control import cancel
    from matmix.launch.jobs.records import find_home

    parser = Parser(prog="matmix launch cancel", description="Tell a run to save, then end its jobs.")
    parser.add_argument("run", metavar="RUN", help="directory of a run, a sweep or a prepared dataset")
    parser.add_argument("--grace", type=float, default=300, help="seconds that saving may take (default: 300)")
    given = parser.parse_args(arguments)
    return 0 if cancel(find_home(given.run), given.grace) else 1


def _resubmit(arguments: list[str]) -> int:
    from matmix.launch.jobs import control as jobs
    from matmix.launch.jobs.records import find_home

    parser = Parser(prog="matmix launch resubmit", description="Start the last launch again: same code, same config.")
    parser.add_argument("run", metavar="RUN", help="directory of a run, a sweep or a prepared dataset")
    home = find_home(parser.parse_args(arguments).run)
    if jobs.last_job(home).kind == "local":
        return jobs.resubmit_local(home)
    job = jobs.resubmit(home)
    print("Nothing to do: it is finished" if job is None else f"Submitted job {job.job} (launch {job.launch})")
    return 0


def _processes_parser(kind: str) -> Parser:
    parser = Parser(prog=f"matmix launch {kind}", usage=f"matmix launch {kind} RECIPE [options] [--key value ...]")
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="processes on this host, one a GPU")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    return parser


def _read(parser: Parser, arguments: list[str]) -> tuple[str, argparse.Namespace, list[str]]:
    """Recipe, the launcher's own options, and the recipe's overrides."""
    if {"-h", "--help"} & set(arguments):
        parser.parse_args(["--help"])
    recipe, rest = split_recipe(arguments, parser.prog)
    given, overrides = parser.parse_known_args(rest)
    check_overrides(parser, overrides)
    for name in ("nproc", "nnodes"):
        if getattr(given, name, 1) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(given, name)}")
    return recipe, given, overrides


def _local(arguments: list[str]) -> int:
    from matmix.launch.jobs.local import prepare_local, run_local

    parser = _processes_parser("local")
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="as --max-requeues of slurm; 0 = never (default: 3)"
    )
    recipe, given, overrides = _read(parser, arguments)
    run = prepare_local(
        recipe,
        overrides,
        nproc=given.nproc,
        max_restarts=given.max_restarts,
        command=["launch", "local", *arguments],
        dry_run=given.dry_run,
    )
    if given.dry_run:
        print(f"{run.nproc} x {shlex.join(run.command())}")
        return 0
    return run_local(run)


def _torchrun(arguments: list[str]) -> int:
    from matmix.launch.jobs import torchrun
    from matmix.launch.jobs.host import rank_command, run_here
    from matmix.train.recipe import load_config

    parser = _processes_parser("torchrun")
    parser.add_argument("--nnodes", type=int, required=True, metavar="N", help="nodes; this command runs on each")
    parser.add_argument("--rdzv", required=True, metavar="HOST:PORT", help="where the nodes meet: one of them, by name")
    parser.add_argument("--node-rank", type=int, help="number of this node, 0 on HOST; without, as the nodes arrive")
    parser.add_argument("--rdzv-id", help="name of this start, the same on all nodes (default: the run's)")
    parser.add_argument("--local-addr", help="this node's address for the others (default: the one that leads to HOST)")
    recipe, given, overrides = _read(parser, arguments)
    endpoint = torchrun.parse_endpoint(given.rdzv)
    config = load_config(recipe, overrides)
    config.micro_batch(given.nnodes * given.nproc)
    if given.node_rank is not None and not 0 <= given.node_rank < given.nnodes:
        raise ValueError(f"--node-rank must lie between 0 and {given.nnodes - 1}, got {given.node_rank}")
    run_id = re.sub(r"[^A-Za-z0-9._-]+", "-", given.rdzv_id or Path(config.run_dir).name).strip(".-") or "run"
    local_addr = given.local_addr or torchrun.address_here(endpoint[0])
    words = torchrun.torchrun_words(
        [recipe, *overrides],
        nnodes=given.nnodes,
        nproc=given.nproc,
        endpoint=endpoint,
        run_id=run_id,
        local_addr=local_addr,
        node_rank=given.node_rank,
    )
    if given.nnodes == 1:  # there is nobody to meet: neither an agent nor a store on the network is needed
        print(f"{given.nproc} x {shlex.join(rank_command([recipe, *overrides]))}", flush=True)
        return 0 if given.dry_run else run_here([recipe, *overrides], given.nproc, run_id)
    if given.dry_run:
        print("torchrun " + shlex.join(words))
        return 0
    if local_addr != endpoint[0] if given.node_rank is None else given.node_rank:
        torchrun.wait_for_host(endpoint)
    return torchrun.run_node(words, torchrun.environment_for(given.nproc, run_id))


KINDS: dict[str, Callable[[list[str]], int]] = {
    "local": _local,
    "torchrun": _torchrun,
    "slurm": _slurm,
    "status": _status,
    "cancel": _cancel,
    "resubmit": _resubmit,
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
