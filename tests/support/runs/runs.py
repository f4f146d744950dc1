"""Shorthand for runs of the debug recipes."""

from __future__ import annotations

import json
from pathlib import Path

from matmix.train.loop import Result, train
from matmix.train.recipe import load_config


def run_recipe(recipe: str, dataset: str, run_dir, *overrides: str) -> Result:
    """Trains in this process. The debug recipes' four micro-batches a step are two here: small as these are, it is
    their number that takes the time."""
    arguments = ["--data.path", dataset, "--run-dir", str(run_dir), "--device", "cpu", *overrides]
    if recipe.startswith("debug_") and "--micro-batch-size" not in overrides:
        arguments += ["--micro-batch-size", "4"]
    return train(load_config(recipe, arguments))


def records(run_dir, kind: str = "train") -> list[dict]:
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(run_dir) -> list[float]:
    return [record["loss"] for record in records(run_dir)]


def weights(run_dir) -> dict:
    """Full weights of the newest checkpoint."""
    from saved_weights import read_weights

    newest = max((Path(run_dir) / "checkpoints").glob("step-*"))
    return dict(read_weights(newest))
