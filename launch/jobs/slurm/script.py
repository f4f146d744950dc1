"""Renders batch scripts from templates (jinja2); every value reaches the shell through a filter that quotes it."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")


def render(template: str, values: dict[str, Any], replacement: str = "") -> str:
    """The text of a bundled template, or of the user's file `replacement`, with `values` filled in.

    Templates have the filters `sh` (a word of the shell) and `sbatch` (a value after #SBATCH --key=). Raises ValueError
    naming template and line where it cannot be rendered, for example for a name that does not exist.
    """
    if replacement and not Path(replacement).is_file():
        raise FileNotFoundError(f"template not found: {replacement}")
    source = (
        Path(replacement)
        if replacement
        else Path(str(resources.files("matmix.launch.jobs.slurm.templates"))) / template
    )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"sh": lambda value: shlex.quote(str(value)), "sbatch": sbatch_value}
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
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


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
