"""The best checkpoint is kept, and a run that gets no better ends, also when it was killed in between."""

from __future__ import annotations

import json
import math

import pytest
from labelled import texts, write_recipe
from runs import records, weights

from matmix.train.config import EvaluationConfig
from matmix.train.guards.best import BestEvaluation
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.train.tasks.base import Metric

KNOWN = (Metric(name="loss", title="loss"), Metric(name="accuracy", title="accuracy", higher_is_better=True))


def _after(values, name="accuracy", patience=2):
    best = BestEvaluation(EvaluationConfig(best=name, patience=patience), KNOWN)
    for step, value in enumerate(values):
        best.after_evaluation(step, {name: value})
    return best.step, best.stops


def test_the_direction_is_that_of_the_metric():
    assert _after([0.5, 0.7, 0.6]) == (1, False)
    assert _after([0.5, 0.7, 0.6, 0.7]) == (1, True)
    assert _after([0.5, 0.7, 0.6], "loss") == (0, True)
    assert _after([math.nan, 0.5, 0.6], "loss") == (1, False)
    with pytest.raises(ValueError, match='"acuracy" is no metric of this run; the nearest is "accuracy"'):
        _after([], "acuracy")
    with pytest.raises(ValueError, match=r"patience needs evaluation.best"):
        EvaluationConfig(patience=1)


def test_a_run_that_gets_no_better_ends_with_its_best_checkpoint(tmp_path):
    recipe = write_recipe(tmp_path, texts(53), texts(31, seed=1))
    # At this rate the loss soon grows.
    common = [
        "--device",
        "cpu",
        "--steps",
        "40",
        "--evaluation.every",
        "2",
        "--checkpoint.every",
        "2",
        "--optimizer.lr",
        "0.2",
    ]
    common += ["--schedule.name", "constant", "--evaluation.best", "loss", "--evaluation.patience", "2"]
    common += ["--checkpoint.keep-last", "1", "--evaluation.evaluator", "{name = 'scores', every = 0}"]
    whole = train(load_config(recipe, [*common, "--run-dir", str(tmp_path / "whole")]))
    validation = [(record["loss"], record["step"]) for record in records(tmp_path / "whole", "validation")]
    _, best = min(validation)
    assert whole.finished
    assert whole.step == best + 4 < 40
    with_scores = [record["step"] for record in records(tmp_path / "whole", "validation") if "f1" in record]
    assert with_scores == [whole.step]  # which are for the end of a run, also of one that ends early
    kept = [path.name for path in sorted((tmp_path / "whole" / "checkpoints").iterdir())]
    assert kept == [f"step-{step:08d}" for step in (best, whole.step)]
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["best"]["metric"], summary["best"]["step"]) == ("loss", best)
    train(load_config(recipe, [*common, "--run-dir", str(tmp_path / "parts"), "--stop-step", str(best + 3)]))
    again = train(load_config(recipe, [*common, "--run-dir", str(tmp_path / "parts")]))
    assert (again.step, again.finished) == (whole.step, True)
    expected = weights(tmp_path / "whole")
    assert all((tensor == expected[name]).all() for name, tensor in weights(tmp_path / "parts").items())


def test_lower_layers_learn_slower_and_frozen_parameters_stay(tmp_path):
    recipe = write_recipe(tmp_path, texts(53), texts(31, seed=1))
    options = [
        "--device",
        "cpu",
        "--optimizer.layer-decay",
        "0.5",
        "--optimizer.freeze",
        "*.mixer.*",
        "embeddings.word.*",
    ]

    def run(steps):
        train(load_config(recipe, [*options, "--run-dir", str(tmp_path / "run"), "--stop-step", steps]))
        return weights(tmp_path / "run")

    before, after = run("1"), run("3")
    changed = {name for name in before if not (before[name] == after[name]).all()}
    frozen = {name for name in before if ".mixer." in name or name.startswith("embeddings.word.")}
    assert frozen
    assert not changed & frozen
    assert {"classifier.output.weight", "embeddings.norm.weight"} <= changed
    with pytest.raises(ValueError, match=r'optimizer.freeze: "embedings.\*" matches no parameter'):
        train(load_config(recipe, ["--run-dir", str(tmp_path / "no"), "--optimizer.freeze", "embedings.*"]))
