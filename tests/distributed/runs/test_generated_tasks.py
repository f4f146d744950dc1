"""A generated task on several ranks: the run and its scores are those of one rank."""

import json

import pytest
import run_scenarios
from harness import run_distributed
from runs import records

RECIPE = """
steps = 3
global_batch_size = 8
device = "cpu"
[model]
d_model = 16
n_layers = 1
layers = ["mru"]
mixers.mru.order = 4
[data]
packing = "rows"
seqlen = 16
workers = 0
[data.synthetic]
task = "mqar"
items = 3
validation_samples = 11
[optimizer]
lr = 1e-2
[checkpoint]
every = 0
[logging]
every = 1
tensorboard = false
progress = false
"""


@pytest.mark.slow
def test_two_ranks_read_and_score_what_one_does(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    runs = {name: [(str(recipe), ["--run-dir", str(tmp_path / name)])] for name in ("one", "two")}
    ((alone,),) = run_distributed(run_scenarios.train_all, 1, arguments=(runs["one"],))
    for (together,) in run_distributed(run_scenarios.train_all, 2, arguments=(runs["two"],)):
        assert together == alone
    one, two = (json.loads((tmp_path / name / "summary.json").read_text())["validation"] for name in ("one", "two"))
    # A guess could only change where two tokens are as likely as one another to six digits.
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6)  # gains are differences of losses, and may be 0
    assert {"accuracy", "accuracy_x8", "sequence_accuracy_x8"} <= set(one)
    for first, second in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=2e-5)
