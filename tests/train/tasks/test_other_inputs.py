"""A regression on float sequences: the model, the data and the task are one file each, from outside. It trains,
resumes, is estimated and exported as models of tokens are."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest
import torch
from runs import losses, records, weights
from series_model import SeriesModel

from matmix.launch.cli import main
from matmix.model.interop import read_export
from matmix.train.loop import train
from matmix.train.recipe import load_config

DATA = '''
import numpy as np

from matmix.data.synthetic import GeneratedSamples


class Waves(GeneratedSamples):
    """Two sines of random frequency and phase; the label is the next value, the last one has none."""

    causal_form, bidirectional_form = True, False

    def check(self, seqlen):
        pass

    def padding(self, rows, seqlen):
        return np.zeros((rows, seqlen, 2), dtype=np.float32), np.full((rows, seqlen, 2), np.nan, dtype=np.float32)

    def fill(self, draw, inputs, labels, mask):
        steps = np.arange(len(inputs))[:, None]
        inputs[:] = np.sin(draw.uniform(0.2, 0.8, 2) * steps + draw.uniform(0, 6, 2))
        labels[:-1] = inputs[1:]
'''
TASK = '''
import math

from matmix.train.tasks import Loss, Metric, Task


class Regression(Task):
    """Squared errors, summed over the channels of a position."""

    architectures = ("series_model:SeriesModel",)
    loss_metric = Metric(name="loss", title="loss", unit="squared units per step")
    metrics = (Metric(name="rmse", title="root mean squared error", unit="units"),)

    def loss(self, model, batch):
        predicted = self.forward(model, batch).float()
        errors = (predicted - batch.labels.nan_to_num()).square()
        total = (errors * ~batch.labels.isnan()).sum()
        return Loss(total, total.detach(), {})

    def measures(self, means, loader):
        return {**means, "rmse": math.sqrt(means["loss"])}
'''
RECIPE = """
steps = 40
global_batch_size = 8
micro_batch_size = 4
device = "cpu"
[model]
architecture = "series_model:SeriesModel"
options = { channels = 2 }
d_model = 16
n_layers = 2
layers = ["mru"]
mlp_ratio = 2.0
[model.mixers.mru]
order = 4
[data]
packing = "rows"
seqlen = 12
workers = 0
[data.synthetic]
task = "wave_data:Waves"
validation_samples = 20
[objective]
name = "wave_task:Regression"
[optimizer]
lr = 1e-2
[evaluation]
every = 20
[checkpoint]
every = 20
[logging]
every = 1
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    (tmp_path / "wave_data.py").write_text(DATA)
    (tmp_path / "wave_task.py").write_text(TASK)
    (tmp_path / "waves.toml").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wave_data", "wave_task"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(tmp_path / "waves.toml")


def test_it_trains_and_tells_so(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", recipe, "--run-dir", str(run)]) == 0
    said = capsys.readouterr()
    assert losses(run)[-1] < 0.5 * losses(run)[0]
    first, last = records(run, "validation")
    assert last.keys() == {"kind", "step", "loss", "rmse"}
    assert last["loss"] < first["loss"]
    assert last["rmse"] == math.sqrt(last["loss"])
    assert f"Validation loss {last['loss']:.4f} squared units per step, root mean squared error" in said.out
    assert "Unigram" not in said.out
    assert "generate" not in said.out
    assert f"validation loss {last['loss']:.4f}, root mean squared error {last['rmse']:.4f}\n" in said.err
    assert json.loads((run / "summary.json").read_text())["validation"]["rmse"] == last["rmse"]
    assert not (run / "tokenizer").exists()
    tags = {path.name.split(".")[0] for path in (run / "tensorboard").iterdir()}
    assert tags == {"events"}


def test_a_validation_loss_is_that_of_its_definition(recipe, tmp_path):
    """Also with rows of padding in the last batch, and over micro-batches of any size."""
    found = []
    for micro in ("1", "8"):
        options = ["--run-dir", str(tmp_path / micro), "--micro-batch-size", micro, "--steps", "1"]
        found.append(train(load_config(recipe, options)).metrics["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_resumed_run_is_bit_identical(recipe, tmp_path):
    train(load_config(recipe, ["--run-dir", str(tmp_path / "whole")]))
    parts = tmp_path / "parts"
    assert train(load_config(recipe, ["--run-dir", str(parts), "--stop-step", "25"])).step == 25
    assert train(load_config(str(parts), ["--data.workers", "1"])).steps_done == 15
    assert losses(parts) == losses(tmp_path / "whole")
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts).items())


def test_its_export_predicts_what_the_run_learned(recipe, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    result = train(load_config(recipe, ["--run-dir", str(run)]))
    assert main(["export", str(run), "--out", str(out)]) == 0
    model = read_export(out)
    assert isinstance(model, SeriesModel)
    steps = torch.arange(13)[:, None] * torch.tensor([0.3, 0.7])
    values = steps.sin()[None]
    with torch.no_grad():
        error = (model.eval()(values[:, :-1]) - values[:, 1:]).square().sum(-1).mean()
    assert error < 3 * result.metrics["loss"] + 0.1


def test_memory_and_cost_are_estimated(recipe, capsys):
    assert main(["train", recipe, "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--objective.name", "causal_lm"], 'trains model.architecture = "language_model"'),
        (["--data.synthetic.task", "parity"], "the data holds tokens, but a series_model:SeriesModel reads values"),
        (["--model.architecture", "nowhere:Model"], "cannot import nowhere"),
    ],
)
def test_what_does_not_fit_is_one_line(recipe, options, words, tmp_path, capsys):
    assert main(["train", recipe, "--run-dir", str(tmp_path / "run"), *options]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert words in error
    assert not (tmp_path / "run").exists()


def test_a_config_may_be_copied(recipe):
    config = load_config(recipe)
    assert dataclasses.replace(config, seed=1).model.options == {"channels": 2}
