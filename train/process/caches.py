"""Sets where compiled kernels are cached: on this node and for this user alone, because whoever can write there can run
code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from matmix.data.storage.private import check_named, private_folder, standard_folder

NODE_VARIABLE = "MATMIX_NODE_FOLDER"
FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def node_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """This user's folder on this node's own disk: MATMIX_NODE_FOLDER, or one below SLURM_TMPDIR or TMPDIR.

    Raises as `private_folder` and `standard_folder`.
    """
    if given := environment.get(NODE_VARIABLE):
        return private_folder(given)
    base = environment.get("SLURM_TMPDIR") or tempfile.gettempdir()
    return standard_folder(Path(base) / f"matmix-{os.getuid()}")


def cache_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of compilers and their values on this node. What the user has set stays, once it has been looked at.

    Raises ValueError where the user's own folder cannot be trusted, and as `node_folder`.
    """
    found = {}
    for name, folder in FOLDERS.items():
        if environment.get(name):
            check_named(environment[name], name)
        else:
            found[name] = str(private_folder(node_folder(environment) / folder))
    return found


def use_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets them. Raises as `cache_variables`."""
    environment.update(cache_variables(environment))
