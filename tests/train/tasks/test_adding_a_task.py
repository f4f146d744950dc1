"""docs/adding-a-task.md works: the one file on it trains, resumes, is evaluated and shown."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
import torch
from failures import each
from paths import ROOT
from runs import losses, records, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from matmix.launch.cli import main
from matmix.train.estimate.plan import make_plan
from matmix.train.loop import train
from matmix.train.recipe import load_config

PAGE = (ROOT / "docs/adding-a-task.md").read_text(encoding="utf-8")
(FILE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
RECIPE = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)[0]


@pytest.fixture
def recipe(dataset, tmp_path, monkeypatch) -> str:
    """debug_mru with the task and the evaluator of the page, whose file is on sys.path."""
    (tmp_path / "smoothing.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "smoothing", raising=False)
    path = tmp_path / "mine.toml"
    plain = (ROOT / "train/recipes/debug_mru.toml").read_text().replace("datasets/shakespeare", dataset)
    path.write_text(f'device = "cpu"\n{plain}\n{RECIPE}')
    return str(path)


def test_it_trains_resumes_and_is_shown(recipe, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", recipe, "--run-dir", str(whole), "--logging.tensorboard", "True"]) == 0
    printed = capsys.readouterr()
    train(load_config(recipe, ["--run-dir", str(parts), "--stop-step", "3"]))
    assert train(load_config(recipe, ["--run-dir", str(parts)])).steps_done == 5
    assert losses(parts) == losses(whole)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts).items())
    assert records(parts, "validation") == records(whole, "validation")

    assert all(0 <= record["top5"] <= 1 for record in records(whole))
    assert [sorted(record) for record in records(whole, "validation")] == [
        ["entropy", "kind", "step"],
        ["kind", "loss", "step", "top5"],
        ["entropy", "kind", "step"],
        ["entropy", "kind", "loss", "step", "top5"],
    ]
    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    steps = {"train/top5": list(range(1, 9)), "validation/top5": [4, 8], "validation/entropy": [3, 6, 8]}
    for tag, expected in steps.items():
        assert [event.step for event in events.Scalars(tag)] == expected
    last = records(whole, "validation")[-1]
    assert json.loads((whole / "summary.json").read_text())["validation"]["entropy"] == last["entropy"]
    assert 0 < last["entropy"] <= math.log(2048)
    shown = f"target among the likeliest five {last['top5']:.1%}"
    entropy = f"entropy of the predictions {last['entropy']:.3f}"
    assert f"validation loss {last['loss']:.4f}, {shown}, {entropy}\n" in printed.err
    assert f"Validation loss {last['loss']:.4f} nats per token, {shown}." in printed.out
    assert f"Entropy of the predictions: {last['entropy']:.3f} nats." in printed.out


@pytest.mark.slow
def test_the_reported_loss_is_that_of_the_built_in_task_and_smoothing_changes_training(recipe, dataset, tmp_path):
    """At step 1 the weights are the same: only what is differentiated differs."""
    config = load_config("debug_mru", ["--data.path", dataset, "--run-dir", str(tmp_path / "plain"), "--device", "cpu"])
    train(config)
    train(load_config(recipe, ["--run-dir", str(tmp_path / "mine")]))
    plain, mine = losses(tmp_path / "plain"), losses(tmp_path / "mine")
    assert mine[0] == pytest.approx(plain[0], rel=1e-5)
    assert abs(mine[-1] - plain[-1]) > 1e-5


@pytest.mark.slow
def test_estimates_know_it(recipe):
    own = make_plan(load_config(recipe, ["--model.vocab-size", "2048"]), 1)
    plain = make_plan(load_config("debug_mru", ["--model.vocab-size", "2048"]), 1)
    assert own.flops_per_unit == plain.flops_per_unit
    assert own.total_bytes > plain.total_bytes  # it keeps the logits of the whole batch


@each(
    "arguments, words",
    [
        (["--objective.name", "smoothing:Smoothed"], "smoothing has no Smoothed"),
        (["--objective.name", "not_there:Task"], "cannot import not_there"),
        (["--objective.name", "smoothing:Entropy"], "is not a subclass of matmix.train.tasks.Task"),
        (["--objective.options", "{smoothin = 0.1}"], 'unknown key "smoothin"; the nearest known key is "smoothing"'),
        (["--objective.options", "{smoothing = 'much'}"], 'objective.options: "smoothing" should be float'),
        (["--objective.options", "much"], "should be a table"),
        (["--objective.name", "causal_lm"], 'objective.options: unknown key "smoothing": there are no options'),
        (
            ["--model.architecture", "encoder", "--model.layers", "hydra"],
            'trains model.architecture = "language_model"',
        ),
        (
            ["--evaluation.evaluator", "{name = 'smoothing:SmoothedLM'}"],
            "is not a subclass of matmix.train.evaluators.Evaluator",
        ),
        (["--evaluation.evaluator", "{name = 'mixin'}"], "did you mean 'mixing'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(recipe, arguments, words, tmp_path, capsys):
    assert main(["train", recipe, "--run-dir", str(tmp_path / "run"), *arguments]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert words in error
    assert not (tmp_path / "run").exists()


def test_reading_the_config_of_a_run_imports_nothing(recipe, tmp_path):
    """It may be somebody else's."""
    config = load_config(recipe, ["--run-dir", str(tmp_path / "run")])
    assert config.objective.options == {"smoothing": 0.05}
    assert "smoothing" not in sys.modules


def test_another_task_is_another_run(recipe, tmp_path, capsys):
    train(load_config(recipe, ["--run-dir", str(tmp_path / "run"), "--stop-step", "1"]))
    words = ["--objective.name", "causal_lm", "--objective.options", "{}"]
    assert main(["train", recipe, "--run-dir", str(tmp_path / "run"), *words]) == 2
    assert "objective.name: 'smoothing:SmoothedLM' there, 'causal_lm' here" in capsys.readouterr().err
