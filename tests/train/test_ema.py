"""Runs with an average of their weights: exact resumption, evaluation beside the weights, export and evaluation by
choice."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from runs import losses, records, run_recipe, weights
from safetensors.torch import load_file

from matmix.train.checkpoint.manifest import read_manifest
from matmix.train.engine.kinds import open_full
from matmix.train.estimate.plan import make_plan
from matmix.train.optim.averaging import ENTRIES
from matmix.train.recipe import load_config
from matmix.train.run.trained import open_trained
from matmix.use.exporting import export_run
from matmix.use.opening import open_model

EMA = ["--ema.decay", "0.7", "--evaluation.every", "4"]


def contents(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    state = open_full(newest, read_manifest(newest)["layout"])
    return {key: state.read_whole(key) for key in state.entries}


def averages(run: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in contents(run).items() if key.rsplit(".", 1)[1] == "ema"}


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ema") / "run"
    run_recipe("debug_mru", dataset, path, *EMA)
    return path


def test_training_is_as_without_and_resumes_bit_for_bit(run, dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path / "without", "--evaluation.every", "4")
    run_recipe("debug_mru", dataset, tmp_path / "parts", *EMA, "--stop-step", "3")
    run_recipe("debug_mru", dataset, tmp_path / "parts", *EMA)
    assert losses(run) == losses(tmp_path / "without") == losses(tmp_path / "parts")
    expected, resumed = contents(run), contents(tmp_path / "parts")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in expected.items())
    assert len(averages(run)) == len(list(open_trained(run).weights()))
    without = contents(tmp_path / "without")
    assert {key for key in expected if key.rsplit(".", 1)[1] not in ENTRIES} == without.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in without.items())


def test_it_is_evaluated_beside_the_weights(run, dataset, tmp_path):
    """The record's loss of the average is that of a run whose weights are this average."""
    last = records(run, "validation")[-1]
    assert json.loads((run / "summary.json").read_text())["validation"]["ema_loss"] == last["ema_loss"]
    assert last["ema_loss"] != last["loss"]
    assert {"ema_bits_per_byte", "ema_mixing_gain"} <= last.keys()
    begun = ["--init.from", str(run), "--init.weights", "ema", "--optimizer.lr", "1e-12", "--steps", "1"]
    run_recipe("debug_mru", dataset, tmp_path / "started", *begun)
    assert records(tmp_path / "started", "validation")[-1]["loss"] == pytest.approx(last["ema_loss"], abs=1e-5)


def test_the_best_checkpoint_may_be_that_of_the_average(dataset, tmp_path):
    best = ["--evaluation.best", "ema_loss"]
    run_recipe("debug_mru", dataset, tmp_path / "run", *EMA, *best)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["metric"] == "ema_loss"
    with pytest.raises(ValueError, match="no metric of this run"):
        run_recipe("debug_mru", dataset, tmp_path / "other", *best)


def test_the_export_has_the_weights_that_were_asked_for(run, dataset, tmp_path, capsys):
    export_run(run, tmp_path / "raw")
    export_run(run, tmp_path / "ema", weights="ema")
    assert "averaged weights" in capsys.readouterr().out
    last = records(run, "validation")[-1]
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("raw", "ema")}
    assert f"{last['loss']:.4f} nats" in cards["raw"]
    assert f"{last['ema_loss']:.4f} nats" in cards["ema"]
    assert "moving average, decay 0.7" in cards["ema"]
    assert "moving average" not in cards["raw"]
    trained = dict(open_trained(run).weights())
    found = {name: load_file(tmp_path / name / "model.safetensors") for name in ("raw", "ema")}
    kept = averages(run)
    name = "blocks.0.mixer.in_proj.weight"
    name = name if name in trained else next(name for name in trained if trained[name].dim() == 2)
    key = next(key for key, tensor in found["raw"].items() if torch.equal(tensor, trained[name]))
    assert torch.equal(found["ema"][key], kept[f"optimizer.{name}.ema"])
    assert not torch.equal(found["ema"][key], found["raw"][key])
    source = open_model(run, weights="ema", device="cpu")
    assert torch.equal(dict(source.model.named_parameters())[name], kept[f"optimizer.{name}.ema"])
    with pytest.raises(ValueError, match="only runs have averaged weights"):
        open_model(tmp_path / "raw", weights="ema")


@pytest.mark.slow
def test_it_may_begin_and_end_on_the_way(dataset, tmp_path):
    """It then begins with the weights of that moment; a run without one has none to give."""
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "3")
    with pytest.raises(ValueError, match="holds no average of the weights") as error:
        export_run(tmp_path / "run", tmp_path / "out", weights="ema")
    assert "\n" not in str(error.value)
    before = weights(tmp_path / "run")
    run_recipe("debug_mru", dataset, tmp_path / "run", "--ema.decay", "0.7", "--stop-step", "4")
    after, kept = weights(tmp_path / "run"), averages(tmp_path / "run")
    for key, tensor in kept.items():
        name = key.removeprefix("optimizer.").removesuffix(".ema")
        torch.testing.assert_close(tensor, 0.7 * before[name] + 0.3 * after[name])
    run_recipe("debug_mru", dataset, tmp_path / "run", "--ema.decay", "0")
    assert kept
    assert not averages(tmp_path / "run")


def test_the_estimate_of_memory_counts_it():
    config = load_config("debug_mru", ["--model.vocab-size", "300"])
    averaged = dataclasses.replace(config, ema=dataclasses.replace(config.ema, decay=0.9))
    assert make_plan(averaged, 2).parts["moments"] == 1.5 * make_plan(config, 2).parts["moments"]
