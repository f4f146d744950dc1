"""The loss by distance to the nearest token that is seen, against the same by brute force."""

from types import SimpleNamespace

import pytest
import torch
from runs import records, run_recipe

from matmix.data.loading.masking import IGNORED, MaskingConfig
from matmix.train.evaluators.spans import SpanLoss, distances
from matmix.train.tasks.config import ObjectiveConfig


def test_distances():
    _ = IGNORED
    labels = torch.tensor([[1, 2, 3, _, _, 4, 5, _], [_, 1, 2, 3, 4, 5, 6, 7], [_] * 8, [1] * 8])
    found = distances(labels)
    assert found[:3].tolist() == [[3, 2, 1, 0, 0, 1, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0] * 8]
    assert (found[3] == 8).all()


def test_bins_of_a_span_of_16():
    config = SimpleNamespace(objective=ObjectiveConfig(evaluation_masking=MaskingConfig(span=16)))
    own = SpanLoss(config, None, None)
    evaluation = SimpleNamespace(engine=SimpleNamespace(device="cpu"), sum_over_ranks=lambda sums: sums)
    own.begin(evaluation)
    labels = torch.tensor([[IGNORED, *range(16), IGNORED]])
    batch = SimpleNamespace(labels=labels, weights=None, select=torch.arange(1, 17))
    own.observe(batch, SimpleNamespace(loss=torch.arange(16.0)), 16)
    assert own.finish(evaluation) == {
        "span_loss/1": pytest.approx(7.5),
        "span_loss/2-3": pytest.approx(7.5),
        "span_loss/4-7": pytest.approx(7.5),
        "span_loss/8+": pytest.approx(7.5),
    }
    assert own.sums[1].tolist() == [2, 4, 8, 2]


def test_a_run_measures_it(dataset, tmp_path):
    spans = [f"--objective.{table}.span=4" for table in ("masking", "evaluation-masking")]
    run_recipe("debug_hydra", dataset, tmp_path / "run", "--steps", "1", *spans)
    found = records(tmp_path / "run", "validation")[-1]
    assert {name for name in found if name.startswith("span_loss")} == {"span_loss/1", "span_loss/2+"}
