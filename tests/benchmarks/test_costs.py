"""What the trainer's benchmark measures of a recipe."""

import pytest

from matmix.benchmarks.costs import measure_context, measure_overhead, measure_replicas, median_interval
from matmix.train.recipe import load_config


@pytest.mark.parametrize("recipe", ["debug_mru", "debug_hydra"])
def test_what_the_context_costs_is_measured_where_it_is_asked_for(dataset, recipe):
    arguments = ["--data.path", dataset, "--device", "cpu"]
    measured = measure_context(load_config(recipe, arguments))
    assert measured["context_seconds"] > 0
    assert measured["evaluation_seconds"] > 0
    assert measure_context(load_config(recipe, [*arguments, "--evaluation.ablation-batches", "0"])) == {}


def test_what_a_comparison_of_copies_costs_is_measured(dataset):
    measured = measure_replicas(load_config("debug_mru", ["--data.path", dataset, "--device", "cpu"]))
    assert 0 < measured["replica_check_seconds"] < 5


def test_the_trainer_is_measured_in_pairs_with_a_bare_loop(dataset):
    measured = measure_overhead(load_config("debug_mru", ["--data.path", dataset, "--device", "cpu"]), 2)
    assert measured["overhead_low"] <= measured["overhead"] <= measured["overhead_high"]
    assert min(measured["trainer_seconds_per_step"], measured["bare_seconds_per_step"]) > 0


def test_the_interval_of_a_median():
    assert median_interval([float(value) for value in range(100)]) == (40, 49.5, 60)
    assert median_interval([3.0]) == (3, 3, 3)
