"""Translates Slurm's variables in a rank's environment into those that training knows. (Standard library only.)"""

from __future__ import annotations

from collections.abc import Mapping

from matmix.train.process.launched import NODE_VARIABLE
from matmix.train.process.node_folders import DISK_VARIABLE

_PLACE = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "GROUP_RANK": "SLURM_NODEID",
}
_NODE = {NODE_VARIABLE: "SLURMD_NODENAME", DISK_VARIABLE: "SLURM_TMPDIR"}


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what Slurm says of this node and, under `srun`, torchrun's variables for this process.

    The latter are left out where they are set or where there is one process only; MASTER_ADDR and MASTER_PORT come from
    the batch script. A step's own counts are used, so that a step smaller than the job is whole by itself. Raises
    ValueError where Slurm's variables are incomplete.
    """
    node = {name: environment[source] for name, source in _NODE.items() if environment.get(source)}
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return node
    step_tasks = environment.get("SLURM_STEP_NUM_TASKS")
    merged = {**environment, **({"SLURM_NTASKS": step_tasks} if step_tasks else {})}
    missing = [name for name in _PLACE.values() if name not in merged]
    if missing:
        raise ValueError(f"SLURM_PROCID is set but {', '.join(missing)} is not: start the ranks with srun")
    place = {name: merged[source] for name, source in _PLACE.items()}
    if place["WORLD_SIZE"] == "1":
        return node
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"])
    return {**node, **place, "LOCAL_WORLD_SIZE": str(counts[int(place["GROUP_RANK"])])}


def tasks_per_node(text: str) -> list[int]:
    """Reads Slurm's counts: "2(x3),1" -> [2, 2, 2, 1]. Raises ValueError for anything else."""
    counts: list[int] = []
    for piece in text.split(","):
        count, _, times = piece.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
