"""What evaluations say of the context is the same on any engine and number of ranks, and changes no later step."""

import pytest
import scenarios
from harness import run_distributed
from runs import losses, records

RECIPES = ("debug_mru", "debug_hydra")
ENGINES = {
    "fsdp2": ["--engine.activation-checkpointing", "full"],
    "zero3": ["--engine.name", "deepspeed", "--engine.zero-stage", "3"],
}
PAIRS = [("debug_mru", "zero3"), ("debug_hydra", "fsdp2")]
# The whole split, whose last global batch has rows of padding on one rank, also without mixing.
OPTIONS = ["--device", "cpu", "--model.dropout", "0", "--steps", "4", "--checkpoint.every", "0"]
OPTIONS += ["--evaluation.every", "2", "--evaluation.batches", "0"]
OPTIONS += ["--evaluation.ablation-batches", "99", "--logging.progress", "False"]


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(dataset, tmp_path):
    def run(recipe, name, *options):
        return recipe, ["--data.path", dataset, "--run-dir", str(tmp_path / f"{recipe}-{name}"), *OPTIONS, *options]

    scenarios.train_recipes([run(recipe, "one") for recipe in RECIPES])
    runs = [run(recipe, name, *ENGINES[name]) for recipe, name in PAIRS]
    runs.append(run("debug_mru", "never", *ENGINES["zero3"], "--evaluation.every", "0"))
    run_distributed(scenarios.train_recipes, 2, arguments=(runs,))
    for recipe, name in PAIRS:
        expected = records(tmp_path / f"{recipe}-one", "validation")
        assert {"context_gain", "loss_without_mixing", "mixing_gain"} <= expected[-1].keys()
        found = records(tmp_path / f"{recipe}-{name}", "validation")
        assert [record["step"] for record in found] == [2, 4]
        for got, wanted in zip(found, expected, strict=True):
            assert list(got) == list(wanted)
            for key in wanted.keys() - {"kind"}:
                assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), (recipe, name, key)
    assert losses(tmp_path / "debug_mru-zero3") == losses(tmp_path / "debug_mru-never")
