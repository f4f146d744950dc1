"""Site profiles: what is the same for all jobs on a cluster, in one file.

    # ~/.config/matmix/clusters.toml
    default = "jupiter"

    [jupiter]
    partition = "gpu"
    account = "ab0123"
    gpus_per_node = 4
    setup = ["module load CUDA"]
    env = { NCCL_IB_HCA = "mlx5" }

The keys of a profile are the fields of `SlurmOptions`. MATMIX_CLUSTERS names another file.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from matmix.launch.jobs.slurm.options import FIELDS
from matmix.train.recipe import read_toml

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (int, "a whole number"),
    "str": (str, "a string"),
    "tuple[str, ...]": (list, "a list of strings"),
}


def profiles_path() -> Path:
    """Where profiles are looked for; the file need not exist."""
    if named := os.environ.get("MATMIX_CLUSTERS"):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "matmix" / "clusters.toml"


def load_profile(name: str | None) -> dict[str, Any]:
    """The values of a profile; of the file's `default` where `name` is None; {} where there is neither.

    Raises ValueError (one line, naming file and profile) for unknown profiles and keys and for values of a wrong type.
    """
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
    name = default if name is None else name
    if name is None:
        return {}
    if name not in profiles:
        near = difflib.get_close_matches(str(name), profiles, n=1, cutoff=0.0)
        hint = f'the nearest is "{near[0]}"' if near else "it holds none"
        raise ValueError(f'{path} has no profile "{name}"; {hint}')
    return {key: _checked(key, value, f"{path}: [{name}]") for key, value in profiles[name].items()}


def _checked(key: str, value: Any, where: str) -> Any:
    if key not in FIELDS:
        near = difflib.get_close_matches(key.replace("-", "_"), FIELDS, n=1, cutoff=0.0)
        raise ValueError(f'{where}: unknown key "{key}"; the nearest known key is "{near[0]}"')
    if key == "gpus_per_node" and type(value) is int:
        return str(value)
    if key == "env":
        if not isinstance(value, dict) or not all(isinstance(item, str | int) for item in value.values()):
            raise ValueError(f"{where}: env should be a table of strings, got {value!r}")
        return {name: str(item) for name, item in value.items()}
    kind, words = _KINDS[str(FIELDS[key].type)]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'{where}: "{key}" should be {words}, got {value!r}')
    if isinstance(value, list):
        if not all(isinstance(item, str) for item in value):
            raise ValueError(f'{where}: "{key}" should be {words}, got {value!r}')
        return tuple(value)
    return value
