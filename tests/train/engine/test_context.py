"""Runs that cannot share rows of tokens over ranks are refused before anything is done."""

import pytest
from failures import each

from matmix.train.engine.config import EngineConfig
from matmix.train.engine.mesh import MeshShape
from matmix.train.recipe import load_config

MLP = ["--model.layers", "none"]
FIXED = ["--model.layers", "dense", "--model.max-seqlen", "32", "--data.packing", "rows"]


@each(
    "options, ranks, message",
    [
        ({"context": 2}, 1, r"engine\.context = 2 does not divide the 1 ranks of this run; use a divisor of 1"),
        ({"context": 3}, 8, r"engine\.context = 3 does not divide the 8 ranks of this run; use a divisor of 8"),
        (
            {"context": 2, "replicate": 3},
            8,
            r"engine\.replicate = 3 does not divide the 8 ranks of this run / engine\.context = 4; use a divisor of 4",
        ),
    ],
)
def test_ranks_that_do_not_fit(options, ranks, message):
    with pytest.raises(ValueError, match=message):
        MeshShape.of(EngineConfig(**options), ranks)


@each(
    "recipe, options, message",
    [
        ("debug_hydra", FIXED, r"engine\.context: dense has parameters for every position; set it to 1"),
        ("finetune_images", [], r"engine\.context = 2 cuts rows of tokens over ranks, but the data .* are pictures"),
        ("finetune", [], r"engine\.context = 2 cuts rows of tokens over ranks, but the data .* are examples"),
        ("debug_mru", [*MLP, "--engine.name", "deepspeed"], r"engine\.context = 2 needs engine\.name"),
    ],
)
def test_runs_that_do_not_fit(recipe, options, message):
    with pytest.raises(ValueError, match=message) as error:
        load_config(recipe, ["--engine.context", "2", *options])
    assert "\n" not in str(error.value)


def test_rows_that_do_not_fit():
    config = load_config("debug_mru", [*MLP, "--engine.context", "4", "--data.seqlen", "34", "--data.path", "x"])
    assert config.micro_batch(2) == 2
    one = load_config("debug_mru", [*MLP, "--engine.context", "4", "--data.seqlen", "33", "--data.path", "x"])
    with pytest.raises(ValueError, match=r"engine\.context = 4 does not divide the 2 x 33 tokens of a micro-batch"):
        one.micro_batch(2)
