"""What a Slurm job is asked for: defaults < site profile < command line."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_GPUS = re.compile(r"(?:([A-Za-z0-9_.-]+):)?(\d+)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
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
        for name, low in (("nodes", 1), ("save_seconds", 1)):
            _require(getattr(self, name) >= low, f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("tasks_per_node", "cpus_per_task", "max_requeues", "array_limit"):
            _require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}")
        _require(
            _GPUS.fullmatch(self.gpus_per_node) is not None,
            f"gpus_per_node should be a number or TYPE:NUMBER, got {self.gpus_per_node!r}",
        )
        _require(
            not self.time or _TIME.fullmatch(self.time) is not None,
            f"time should be like 24:00:00, 2-12:00 or minutes, got {self.time!r}",
        )
        limit = _seconds(self.time)
        _require(
            limit is None or limit > self.save_seconds,
            f"time {self.time} must be longer than save_seconds = {self.save_seconds}: the run would be told to save "
            f"as soon as it begins, again and again",
        )
        _require(
            self.container_runtime in ("", "pyxis", "apptainer"),
            f"container_runtime should be pyxis or apptainer, got {self.container_runtime!r}",
        )
        for name in self.env:
            _require(_VARIABLE.fullmatch(name) is not None, f"env: {name!r} cannot be the name of a variable")

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        match = _GPUS.fullmatch(self.gpus_per_node)
        assert match is not None
        return int(match[2])

    @property
    def ranks_per_node(self) -> int:
        """Raises ValueError where neither GPUs nor tasks are given."""
        ranks = self.tasks_per_node or self.gpus
        _require(
            ranks > 0,
            "how many ranks on a node? Give --gpus-per-node N or, without GPUs, --tasks-per-node N (also in a profile)",
        )
        return ranks

    @property
    def runtime(self) -> str:
        """ "" without a container, else pyxis or apptainer."""
        if not self.container:
            return ""
        return self.container_runtime or ("apptainer" if self.container.endswith(".sif") else "pyxis")


def _seconds(limit: str) -> int | None:
    """A time limit as Slurm reads it ("5" and "5:00" are minutes, "1-2" a day and two hours, "0" is no limit); None =
    there is none."""
    if not limit or not limit[0].isdigit():
        return None
    days, dash, clock = limit.rpartition("-")
    fields = [int(field) for field in clock.split(":")]
    if not dash and len(fields) < 3:
        fields = [0, *fields]
    hours, minutes, seconds = [*fields, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


FIELDS = {field.name: field for field in dataclasses.fields(SlurmOptions)}
# Lists and tables of a profile are added to, not replaced, by the command line.
_FLAGS = {"container_mounts": "--container-mount", "sbatch": "--sbatch-option"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `matmix launch slurm` that a profile may hold, too; what is not given stays None."""
    for name, text in _field_docs().items():
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        if name == "env":
            parser.add_argument("--env", action="append", metavar="K=V", help=text)
        elif FIELDS[name].type == "tuple[str, ...]":
            parser.add_argument(flag, dest=name, action="append", metavar="TEXT", help=text)
        elif FIELDS[name].type == "int":
            parser.add_argument(flag, type=int, metavar="N", help=f"{text} (default: {FIELDS[name].default})")
        else:
            parser.add_argument(flag, metavar="TEXT", help=text)


def from_layers(profile: Mapping[str, Any], given: Mapping[str, Any]) -> SlurmOptions:
    """Options from a profile's values and those of the command line (None = not given). Raises ValueError."""
    values: dict[str, Any] = dict(profile)
    for name, value in given.items():
        if name not in FIELDS or value is None:
            continue
        if name == "env":
            values["env"] = {**values.get("env", {}), **dict(map(_split_variable, value))}
        elif isinstance(value, list):
            values[name] = (*values.get(name, ()), *value)
        else:
            values[name] = value
    return SlurmOptions(**values)


def _split_variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None


def _field_docs() -> dict[str, str]:
    """Field name -> the string under it, as one line."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(SlurmOptions))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(before.target, ast.Name)
            docs[before.target.id] = " ".join(str(after.value.value).split()).replace("%", "%%")
    return docs
