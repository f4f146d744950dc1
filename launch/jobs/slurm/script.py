"""Renders batch scripts from templates (jinja2); every value reaches the shell through a filter that quotes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from matmix.data.artifacts import shell_line
from matmix.launch.jobs.slurm.options import SlurmOptions

_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")


def render(template: str, values: dict[str, Any], replacement: str = "") -> str:
    """The text of a bundled template, or of the user's file `replacement`, with `values` filled in.

    Templates have the filters `sh` (a word of the shell) and `sbatch` (a value after #SBATCH --key=). Raises ValueError
    naming template and line where it cannot be rendered, for example for a name that does not exist.
    """
    source = Path(replacement or str(resources.files("matmix.launch.jobs.slurm.templates") / template))
    if not source.is_file():
        raise FileNotFoundError(f"template not found: {source}")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"sh": shell_line, "sbatch": sbatch_value}
    try:
        return environment.from_string(source.read_text(encoding="utf-8")).render(**values)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{source}, line {error.lineno}: {error.message}") from None
    except jinja2.UndefinedError as error:
        raise ValueError(f"{source}: {error.message}; it may use {', '.join(sorted(values))}") from None


def sbatch_value(value: Any) -> str:
    """A value in an #SBATCH line, which sbatch reads by rules like the shell's, without expansion.

    Raises ValueError for line breaks, which it cannot hold.
    """
    text = str(value)
    if "\n" in text or "\r" in text:
        raise ValueError(f"an option of sbatch cannot hold a line break: {text!r}")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def output_pattern(path: Path, pattern: str) -> str:
    """sbatch's --output for a file in `path` whose name holds codes such as %j. Raises ValueError for a backslash."""
    if "\\" in str(path):
        raise ValueError(f"Slurm cannot write below a folder with a backslash in its name: {path}")
    return str(path).replace("%", "%%") + "/" + pattern


def array_option(script: Path, tasks: list[int]) -> str:
    """--array for some of the tasks, with the limit that the script's own line has."""
    own = next(line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith("#SBATCH --array="))
    _, percent, limit = own.partition("%")
    return f"--array={','.join(map(str, tasks))}{percent}{limit}"


def directives(options: SlurmOptions, home: Path, array: str) -> list[str]:
    """The #SBATCH lines, without #SBATCH. Raises ValueError for values that they cannot hold.

    home: holds logs/ and names the job where the options do not. array: as in 0-7, "" = no array.
    """
    if array and options.array_limit:
        array += f"%{options.array_limit}"
    lines = {
        "job-name": options.job_name or home.name,
        "nodes": options.nodes,
        "ntasks-per-node": options.ranks_per_node,
        "gres": f"gpu:{options.gpus_per_node}" if options.gpus else "",
        "cpus-per-task": options.cpus_per_task or "",
        **{key: getattr(options, key) for key in ("mem", "partition", "account", "qos", "time", "dependency")},
        "array": array,
        "signal": f"B:USR2@{options.save_seconds}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": output_pattern(home / "logs", "slurm-%A_%a.out" if array else "slurm-%j.out"),
    }
    written = [f"--{key}={sbatch_value(value)}" for key, value in lines.items() if value != ""]
    return [*written, "--requeue", *map(extra_directive, options.sbatch)]


def extra_directive(text: str) -> str:
    """An --sbatch-option, with or without its dashes, as it stands after #SBATCH."""
    key, equals, value = text.strip().lstrip("-").partition("=")
    if not key or not key.replace("-", "").isalnum():
        examples = "exclusive or constraint=h100"
        raise ValueError(f"--sbatch-option takes an option of sbatch such as {examples}, got {text!r}")
    return f"--{key}={sbatch_value(value)}" if equals else f"--{key}"


def mounts(needed: Iterable[str | Path], options: SlurmOptions) -> list[str]:
    """Returns the mounts of a container: working directory and what is `needed` under their own names, then what the
    user adds."""
    folders: list[Path] = []
    for folder in (Path.cwd(), *(Path.cwd() / path for path in needed if path and "://" not in str(path))):
        if not any(folder.is_relative_to(other) for other in folders):
            folders.append(folder)
    return [*(f"{folder}:{folder}" for folder in folders), *options.container_mounts]
