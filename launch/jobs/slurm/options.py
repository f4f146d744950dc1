"""Holds the options of a Slurm job: defaults < site profile (the same for all jobs of a cluster) < command line."""

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from tyro.constructors import StructFieldSpec

from matmix.train.arguments import BorrowedOptions, read_table
from matmix.train.recipe_files import read_toml

# Options whose values have a form, and that in words.
_PATTERNS = {
    "gpus_per_node": (r"([A-Za-z0-9_.-]+:)?\d+", "a number or TYPE:NUMBER"),
    "time": (r"(?i)|(\d+:){0,2}\d+|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", "like 24:00:00, 2-12:00 or minutes"),
    "container_runtime": ("|pyxis|apptainer", "pyxis or apptainer"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """The fields are also the keys of a site profile; the strings under them are the command line's help."""

    nodes: int = 1
    """Nodes of the job."""
    gpus_per_node: str = "0"
    """GPUs of each node, one rank each; with a type where the site wants one, as in h100:8."""
    tasks_per_node: int = 0
    """Ranks of each node; 0 = one for each GPU. For clusters without GPUs."""
    cpus_per_task: int = 0
    """Cores of each rank; 0 = the site's default."""
    mem: str = ""
    """Memory of each node, as in 500G; 0 = all of it; empty = the site's default."""
    partition: str = ""
    """Partition; empty = the site's default."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    time: str = ""
    """Time limit, as in 24:00:00 or 2-12:00. The run is saved before it ends and goes on in the same job."""
    dependency: str = ""
    """When the job may start, as in singleton (after all earlier jobs of this name) or afterok:123."""
    job_name: str = ""
    """Name of the job; empty = the name of the run directory."""
    container: str = ""
    """Image in which the ranks run: a name or .sqsh file for pyxis, a .sif file for apptainer."""
    container_runtime: str = ""
    """pyxis or apptainer; empty = by the image."""
    container_mounts: tuple[str, ...] = ()
    """SOURCE:TARGET folders seen inside; run directory, data and working directory are there without asking."""
    container_python: str = "python3"
    """The Python inside the image."""
    env: dict[str, str | int | None] = dataclasses.field(default_factory=dict)
    """Variables of the job. K=V is written into the script; K alone takes the submitting shell's value, unwritten."""
    setup: tuple[str, ...] = ()
    """Shell lines that run first in the job, such as module load cuda."""
    master_addr: str = ""
    """Address of rank 0's node; empty = its name or, where that does not resolve, the address that Slurm knows."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, as in exclusive or constraint=h100."""
    template: str = ""
    """A template of your own in place of templates/train.sbatch."""
    max_requeues: int = 3
    """How often a failed run is started again without having got further (preemptions do not count)."""
    save_seconds: int = 180
    """How long before the time limit the run is told to save."""
    array_limit: int = 0
    """Tasks of a job array that run at once; 0 = as many as fit."""

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            low = 1 if name in ("nodes", "save_seconds") else 0
            if field.type is int and getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name, (pattern, words) in _PATTERNS.items():
            if not re.fullmatch(pattern, getattr(self, name)):
                raise ValueError(f"{name} should be {words}, got {getattr(self, name)!r}")
        if 0 < _seconds(self.time) <= self.save_seconds:
            why = "the run would be told to save as soon as it begins, again and again"
            raise ValueError(f"time {self.time} must be longer than save_seconds = {self.save_seconds}: {why}")
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"env: {name!r} cannot be the name of a variable")

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return int(self.gpus_per_node.rpartition(":")[2])

    @property
    def ranks_per_node(self) -> int:
        """Raises ValueError where neither GPUs nor tasks are given."""
        if ranks := self.tasks_per_node or self.gpus:
            return ranks
        where = "--gpus-per-node N or, without GPUs, --tasks-per-node N (also in a profile)"
        raise ValueError(f"how many ranks on a node? Give {where}")

    @property
    def runtime(self) -> str:
        """ "" without a container, else pyxis or apptainer."""
        usual = "apptainer" if self.container.endswith(".sif") else "pyxis"
        return self.container and (self.container_runtime or usual)


FIELDS = {field.name: field for field in dataclasses.fields(SlurmOptions)}


def _seconds(limit: str) -> int:
    """Reads a time limit as Slurm does ("5" and "5:00" are minutes, "1-2" a day and two hours); 0 = no limit."""
    days, dash, clock = limit.rpartition("-")
    fields = [int(field) for field in clock.split(":") if field.isdigit()]
    if not dash and len(fields) < 3:
        fields = [0, *fields]
    hours, minutes, seconds = [*fields, 0, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class SlurmWords(BorrowedOptions):
    """The options of the command line, whose defaults None and () stand for "not given"."""

    described: ClassVar[type] = SlurmOptions

    @classmethod
    def option(cls, field: StructFieldSpec) -> StructFieldSpec:
        flag = {"container_mounts": "container-mount", "sbatch": "sbatch-option"}.get(field.name)
        if FIELDS[field.name].type in (int, str):
            shown = f"(default: {field.default})" if field.type is int else ""
            kind = tyro.conf.arg(metavar="N" if field.type is int else "TEXT", help_behavior_hint=shown)
            return dataclasses.replace(field, type=Annotated[field.type | None, kind], default=None)
        kind = tyro.conf.arg(name=flag, metavar="K=V" if field.name == "env" else "TEXT")
        return dataclasses.replace(field, type=Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], kind], default=())


Profile = Annotated[str | None, tyro.conf.arg(metavar="NAME", help="Site profile (~/.config/matmix/clusters.toml).")]


# -- site profiles -----------------------------------------------------------------------------------------------------


def slurm_options(profile: str | None, given: Mapping[str, Any]) -> SlurmOptions:
    """Makes the options of a site's profile and the `SlurmWords` of the command line. Raises ValueError (one line)."""
    address = os.environ.get("MATMIX_MASTER_ADDR")
    return from_layers(load_profile(profile) | ({"master_addr": address} if address else {}), given)


def from_layers(profile: Mapping[str, Any], given: Mapping[str, Any]) -> SlurmOptions:
    """Makes options of a profile's values and those given, which override single values and are added to others."""
    values: dict[str, Any] = dict(profile)
    for name, value in given.items():
        if name == "env":
            pairs = (word.partition("=") for word in value)
            values["env"] = {**values.get("env", {}), **{key: text if equals else None for key, equals, text in pairs}}
        elif isinstance(value, tuple | list):
            values[name] = (*values.get(name, ()), *value)
        elif value is not None:
            values[name] = value
    return SlurmOptions(**values)


def profiles_path() -> Path:
    """Returns where profiles are looked for; the file need not exist."""
    if named := os.environ.get("MATMIX_CLUSTERS"):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "matmix" / "clusters.toml"


def load_profile(name: str | None) -> dict[str, Any]:
    """Returns the values of a profile, of the file's `default` for None; {} where there is neither. Raises ValueError
    (one line, naming file and profile) for unknown profiles and keys and for values of a wrong type."""
    path = profiles_path()
    if not path.is_file():
        if name is None and "MATMIX_CLUSTERS" not in os.environ:
            return {}
        raise ValueError(f"no profiles: {path} does not exist")
    profiles = read_toml(path)
    default = profiles.pop("default", None)
    for key, value in profiles.items():
        if not isinstance(value, dict):
            raise ValueError(f'{path}: "{key}" should be a table [{key}] with a profile in it, or `default`')
    if (name := default if name is None else name) is None:
        return {}
    if name not in profiles:
        near = difflib.get_close_matches(str(name), profiles, n=1, cutoff=0.0)
        hint = f'the nearest is "{near[0]}"' if near else "it holds none"
        raise ValueError(f'{path} has no profile "{name}"; {hint}')
    values = profiles[name]
    if type(gpus := values.get("gpus_per_node")) is int:
        values["gpus_per_node"] = str(gpus)
    options = read_table(SlurmOptions, values, f"{path}: [{name}]")
    return {key: getattr(options, key) for key in values}
