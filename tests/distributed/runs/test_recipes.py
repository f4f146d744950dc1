"""The debug recipes, data and all, through the training loop: 1 x 4, 2 x 2 and 4 x 1 (ranks x
accumulation)."""

import json
from pathlib import Path

import pytest
import scenarios
from harness import run_distributed
from nightly import nightly
from saved_weights import read_weights

STEPS = 4
RECIPES = ("debug_mru", "debug_hydra")  # packed documents of one, masked and packed ones of the other


def runs(dataset, directory, engines):
    common = ["--data.path", dataset, "--device", "cpu", "--model.dropout", "0", "--steps", str(STEPS)]
    common += ["--checkpoint.every", "0", "--evaluation.every", "0", "--logging.progress", "False"]
    found = {}
    for recipe in RECIPES:
        for name, options in engines.items():
            run_dir = str(Path(directory) / f"{recipe}-{name}")
            found[run_dir] = (recipe, [*common, "--run-dir", run_dir, *options])
    return found


def history(run_dir):
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    validation = [line for line in lines if line["kind"] == "validation"]
    return [(line["loss"], line["grad_norm"], line["tokens"]) for line in steps], validation[-1]["loss"]


@pytest.mark.parametrize("more", [(2,), nightly((2, 4))], ids=str)
def test_loop_on_any_engine_and_number_of_ranks(dataset, tmp_path, more):
    zero3 = ["--engine.name", "deepspeed", "--engine.zero-stage", "3"]
    recompute = ["--engine.activation-checkpointing", "selective", "--engine.selective-by", "op"]
    planned = {
        1: runs(dataset, tmp_path / "1", {"plain": []}),
        2: runs(dataset, tmp_path / "2", {"fsdp2": recompute, "zero3": zero3}),
        4: runs(dataset, tmp_path / "4", {"hsdp": ["--engine.replicate", "2"]}),
    }
    scenarios.train_recipes(list(planned[1].values()))
    for ranks in more:
        run_distributed(scenarios.train_recipes, ranks, arguments=(list(planned[ranks].values()),))
    for recipe in RECIPES:
        reference = tmp_path / "1" / f"{recipe}-plain"
        steps, validation = history(reference)
        assert len(steps) == STEPS
        weights = dict(read_weights(reference / "checkpoints" / f"step-{STEPS:08d}"))
        for run_dir in (Path(path) for ranks in more for path, (name, _) in planned[ranks].items() if name == recipe):
            found, found_validation = history(run_dir)
            for step, (got, want) in enumerate(zip(found, steps, strict=True)):
                assert got == pytest.approx(want, rel=2e-4), (run_dir.name, step)
            assert found_validation == pytest.approx(validation, rel=2e-4), run_dir.name
            for name, tensor in read_weights(run_dir / "checkpoints" / f"step-{STEPS:08d}"):
                # AdamW takes steps of lr whatever the size of a gradient: where that is only rounding, so is
                # the sign.
                assert (tensor - weights[name]).abs().mean().item() < 1e-5, (run_dir.name, name)
