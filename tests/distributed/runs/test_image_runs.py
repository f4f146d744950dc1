"""Image classifiers on several ranks: mixed images, soft targets and the average of the weights are those of one
rank."""

import pytest
import torch
from harness import run_distributed
from image_runs import write_image_recipe
from runs import losses, records, weights

from matmix.train.loop import train
from matmix.train.recipe import load_config


@pytest.mark.slow
def test_two_ranks_and_fewer_that_go_on_are_as_one(tmp_path):
    # A global batch whose pictures are read by two ranks, mixed with each other across them.
    recipe = str(write_image_recipe(tmp_path))
    train(load_config(recipe, ["--run-dir", str(tmp_path / "one")]))
    runs = [(recipe, ["--run-dir", str(tmp_path / "two"), "--micro-batch-size", "2"])]
    runs += [(recipe, ["--run-dir", str(tmp_path / "fewer"), "--stop-step", "3"])]
    run_distributed(_train_all, 2, arguments=(runs,), timeout=300)
    train(load_config(recipe, ["--run-dir", str(tmp_path / "fewer")]))
    for name in ("two", "fewer"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-4), name
        for got, wanted in zip(*(records(tmp_path / which, "validation") for which in (name, "one")), strict=True):
            numbers = [[value for key, value in one.items() if key != "kind"] for one in (got, wanted)]
            # The gain of mixing is a small difference of losses.
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-5), name
        expected = weights(tmp_path / "one")
        for key, tensor in weights(tmp_path / name).items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)


def _train_all(runs: list[tuple[str, list[str]]]) -> None:
    for recipe, options in runs:
        train(load_config(recipe, options))
