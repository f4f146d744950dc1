"""The runs of a comparison: each entry with each seed, in each variant (COMPARISON/<entry>/<variant>/seed-0 and so on).

COMPARISON/<entry>/seed-0.toml        what the process is given
COMPARISON/<entry>/seed-0/            an ordinary run directory, and in it
COMPARISON/<entry>/seed-0/train.log   what the process printed
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from matmix.launch.lab.compare.config import Comparison
from matmix.launch.many.task import Task


def tasks_of(comparison: Comparison, only: Sequence[str] = ()) -> list[Task]:
    """All runs, seed by seed, so that every entry has a first result early.

    only: names of entries and of variants to which they are restricted. Raises ValueError for others.
    """
    entries = {entry.name for entry in comparison.entries}
    variants = {entry.variant for entry in comparison.entries}
    for name in only:
        if name not in entries | variants:
            known = sorted(entries | variants - {""})
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(f'"{name}"' for name in known)
            raise ValueError(f'--only: no entry and no variant is called "{name}" ({hint})')
    entries, variants = entries & set(only) or entries, variants & set(only) or variants
    return [
        Task(
            entry=entry.title,
            seed=seed,
            config=dataclasses.replace(
                entry.config, seed=seed, run_dir=str(comparison.home / entry.folder / f"seed-{seed}")
            ),
        )
        for seed in comparison.settings.seeds
        for entry in comparison.entries
        if entry.name in entries and entry.variant in variants
    ]
