"""Reads measured tile sizes: `kernels/tiles/<architecture>.json`, such as sm_90.json.

    {"architecture": "sm_90", "measured": {where, when and with which versions}, "scan": [{"itemsize": 2, ...}, ...]}

Under the name of an operation stand its configurations, one for each size of the inputs' numbers, with all fields. The
files are written by `benchmarks gpu-session`, are committed, and are never changed while anything runs.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch

FOLDER = Path(__file__).parent
Config = TypeVar("Config", bound=NamedTuple)


def read_all(operation: str, kind: type[Config], folder: Path = FOLDER) -> dict[str, dict[int, Config]]:
    """The configurations of an operation by architecture and bytes per number; {} where no file is there.

    `kind` is a NamedTuple of whole numbers with a field `itemsize`. Raises ValueError, one line, for a file that does
    not hold all of its fields.
    """
    return {path.stem: read(path, operation, kind) for path in sorted(folder.glob("*.json"))}


def read(path: Path, operation: str, kind: type[Config]) -> dict[int, Config]:
    """The configurations of an operation in one file, by bytes per number. Raises ValueError as `read_all` does."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict) or content.get("architecture") != path.stem:
        raise ValueError(f'{path}: "architecture" has to be "{path.stem}", as the file is named')
    rows = content.get(operation, [])
    if not isinstance(rows, list):
        raise ValueError(f'{path}: "{operation}" has to be a list of configurations')
    configs: dict[int, Config] = {}
    for row in rows:
        config = _config(path, operation, kind, row)
        if config.itemsize in configs:
            raise ValueError(f"{path}: {operation} has two configurations for {config.itemsize} bytes")
        configs[config.itemsize] = config
    return configs


def _config(path: Path, operation: str, kind: type[Config], row: Any) -> Config:
    if not isinstance(row, dict) or set(row) != set(kind._fields):
        given, wanted = set(row) if isinstance(row, dict) else set(), set(kind._fields)
        wrong = ", ".join(sorted(given ^ wanted))
        raise ValueError(f"{path}: a configuration of {operation} lacks fields, or has others than it should: {wrong}")
    hints = get_type_hints(kind)
    for name, value in row.items():
        if hints[name] is bool:
            if type(value) is not bool:
                raise ValueError(f"{path}: {operation}: {name} is {value!r}; it has to be true or false")
        elif type(value) is not int or value < 1:
            raise ValueError(f"{path}: {operation}: {name} is {value!r}; it has to be a whole number of 1 or more")
    return kind(**row)


def text(architecture: str, measured: dict[str, Any], configs: dict[str, list[NamedTuple]]) -> str:
    """The content of a file: configurations by operation, and where and when they were measured."""
    rows = {operation: [config._asdict() for config in of_operation] for operation, of_operation in configs.items()}
    return json.dumps({"architecture": architecture, "measured": measured, **rows}, indent=1) + "\n"


@functools.cache
def architecture(device: torch.device) -> str:
    """Returns the architecture of a GPU, such as "sm_90" or "gfx942"; "" for other devices and without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
