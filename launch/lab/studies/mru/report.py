"""What is kept of the study: one JSON record, tables in Markdown and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matmix.data.storage.files import write_atomic
from matmix.launch.lab.benchmarks.measuring.environment import environment
from matmix.launch.lab.studies.mru import pictures, tables
from matmix.launch.lab.studies.mru.grid import PART, best_runs
from matmix.launch.lab.studies.mru.results import Results

PARTS = (PART, "growth", "beyond", "speed")
ONLY_OF_THE_BEST = ("position_loss",)
ONLY_OF_THE_DRAWN = ("curve",)


def report(results: Results, out: Path) -> None:
    """Gathers what is there, writes the record and the pictures to `out` and the tables to the folder of the results,
    and prints the tables. Raises ValueError where there is no result at all."""
    found = {part: results.read(part) for part in PARTS}
    if not any(found.values()):
        raise ValueError(f"{results.folder} holds no results: run another part first")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "mru_study.json", json.dumps(record_of(found), separators=(",", ":")) + "\n")
    text = tables.tables(found)
    write_atomic(results.folder / "tables.md", text + "\n")
    print(text)
    for name, png in pictures.pictures(found).items():
        write_atomic(out / f"mru_{name}.png", png)


def record_of(found: dict[str, Any]) -> dict[str, Any]:
    """What is committed: curves of the runs that are drawn, losses by position of each variant's best."""
    best = best_runs(found[PART]).values()
    runs = []
    for result in found[PART].values():
        left_out = () if result in best else ONLY_OF_THE_BEST
        if result not in best or result["variant"] not in pictures.DRAWN:
            left_out += ONLY_OF_THE_DRAWN
        runs.append({name: value for name, value in result.items() if name not in left_out})
    return {"environment": environment(), **found, PART: runs}
