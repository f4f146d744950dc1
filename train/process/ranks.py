"""Ranks as short texts: ranges for people, Slurm's counts of tasks on nodes, and the variables by which launchers tell
a rank who it is."""

from __future__ import annotations

from collections.abc import Iterable

STORE_VARIABLE = "MATMIX_STORE"
"""A file of this host in which ranks meet; without it, at MASTER_ADDR and MASTER_PORT."""
SECRET_VARIABLE = "MATMIX_SECRET"
"""What the processes of one start have in common, and those of no other."""


def as_ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    pieces: list[list[int]] = []
    for number in sorted(numbers):
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in pieces)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]. Raises ValueError for anything else."""
    counts: list[int] = []
    for piece in text.split(","):
        count, _, times = piece.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
