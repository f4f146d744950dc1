"""`python -P -m matmix.studies.optimizers`: what optimizers make of the quickstart and of a masked Hydra encoder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from matmix.data.storage.files import write_atomic
from matmix.launch.lab.compare.tuning import wanted
from matmix.studies.mru.runs import run
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded
from matmix.train.recipe import load_config

TASKS: dict[str, tuple[str, dict[str, object]]] = {
    "mru": (
        "mru_shakespeare",
        {
            "model.layers": ["mru"],
            "model.mlp_ratio": 4.0,
            "model.mixers.mru.order": 8,
            "model.mixers.mru.shift": "blend",
            "model.init_std": 0.02,
            "schedule.warmup": 40,
        },
    ),
    "hydra": ("hydra_shakespeare", {"global_batch_size": 8, "steps": 400}),
}
"""The recipe of each task, and what is other than in it: a product of matrices from 0.02, without a convolution."""
WAYS: dict[str, dict[str, object]] = {
    "adamw": {},
    "stable_adamw": {"optimizer.name": "stable_adamw"},
    "muon": {"optimizer.name": "muon"},
    "soap": {"optimizer.name": "soap"},
    "adamw, no mixer": {"model.layers": ["none"]},
}
"""What is trained how, by its name in the table."""
SAME = {"evaluation.every": 0, "evaluation.ablation_batches": 0}
"""Of all runs: they are evaluated at their end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Optimizers on the quickstart (an MRU language model) and on masked Shakespeare (a Hydra encoder, with a third of
    the tokens of its recipe), each tuned on the same grid of learning rates with one seed, then run with more seeds.

        matmix prepare bundled:shakespeare --out datasets/shakespeare_char --model-type char --byte-fallback False \\
            --max-document-chars 4000 --validation-fraction 0.03
        matmix prepare bundled:shakespeare --out datasets/shakespeare --vocab-size 2048 --max-document-chars 4000 \\
            --validation-fraction 0.03
        OMP_NUM_THREADS=1 python -P -m matmix.studies.optimizers

    Prints a table of validation losses. All else is as in the recipes. Losses are kept, and no run is made twice.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    """Of mru and hydra."""
    ways: tuple[str, ...] = tuple(WAYS)
    """What is trained how."""
    rates: tuple[float, ...] = (1e-3, 3e-3, 9e-3)
    """Learning rates, from the lowest; the grid goes on at their first ratio while the best rate is at an end of it."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The first is tuned with."""
    out: Path = Path("runs/optimizers")
    """Folder of the losses, one file for each task and way."""

    def run(self) -> int:
        self.out.mkdir(parents=True, exist_ok=True)
        print(
            "| task | trained by | at the rates tried | best rate | its losses, by seed | mean |\n" + "|---" * 6 + "|"
        )
        for task, way in itertools.product(self.tasks, self.ways):
            tried, rate = self.tuned(task, way)
            losses = [self.loss(task, way, rate, seed) for seed in self.seeds]
            words = ", ".join(f"{loss:.3f} at {rate:g}" for rate, loss in sorted(tried.items()))
            seeds = ", ".join(f"{loss:.3f}" for loss in losses)
            print(f"| {task} | {way} | {words} | {rate:g} | {seeds} | {statistics.mean(losses):.3f} |", flush=True)
        return 0

    def tuned(self, task: str, way: str) -> tuple[dict[float, float], float]:
        """Returns the first seed's losses by the rates that were tried, and the rate of the lowest."""
        losses: dict[float, float] = {}
        while points := wanted({"rate": self.rates}, {(("rate", rate),): loss for rate, loss in losses.items()}):
            losses |= {rate: self.loss(task, way, rate, self.seeds[0]) for ((_, rate),) in points}
        return losses, min(losses, key=losses.__getitem__)

    def loss(self, task: str, way: str, rate: float, seed: int) -> float:
        """Returns the validation loss at the end of a run, which is made if it is not there yet; inf if it diverged."""
        path = self.out / f"{task}, {way}.json"
        losses: dict[str, float | None] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        key = f"rate {rate:g}, seed {seed}"
        if key not in losses:
            recipe, own = TASKS[task]
            changes = {**SAME, **own, **WAYS[way], "optimizer.lr": rate, "seed": seed}
            losses[key] = run(load_config(recipe, changes))["loss"]
            write_atomic(path, json.dumps(losses, indent=1) + "\n")
        return math.inf if losses[key] is None else losses[key]


def main(arguments: Sequence[str]) -> int:
    return guarded(lambda: parse_arguments(Study, list(arguments), prog="python -P -m matmix.studies.optimizers").run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
