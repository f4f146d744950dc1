"""A kind of data from outside is one file (tests/support/series.py) and one line in `MODALITIES`, which stands in the
file of its task (tests/support/series_task.py). It is prepared, trained, resumed and evaluated as the bundled ones are.
"""

import math
import sys

import numpy as np
import pytest
import torch
from runs import losses, records, weights

from matmix.data.manifest import Manifest
from matmix.data.modalities import MODALITIES
from matmix.data.prepare.command import prepare
from matmix.launch.cli import main
from matmix.train.loop import train
from matmix.train.recipe import load_config

RECIPE = """
steps = 12
global_batch_size = 8
micro_batch_size = 4
device = "cpu"
[model]
architecture = "series_model:SeriesModel"
d_model = 16
n_layers = 1
layers = ["mru"]
[model.mixers.mru]
nheads = 4
order = 4
[data]
path = "PATH"
seqlen = 12
workers = 0
options = { scale = 2.0 }
[objective]
name = "series_task:NextValue"
[optimizer]
lr = 1e-2
[evaluation]
every = 0
[logging]
every = 1
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """50 series of 16 steps in two files, one of them with NaN."""
    folder = tmp_path_factory.mktemp("series")
    draw = np.random.default_rng(0)
    series = np.sin(np.arange(16) * draw.uniform(0.2, 0.8, (50, 1)) + draw.uniform(0, 6, (50, 1))).astype(np.float32)
    series[7, 3] = np.nan
    paths = [str(folder / name) for name in ("first.npy", "second.npy")]
    for path, part in zip(paths, (series[:20], series[20:]), strict=True):
        np.save(path, part)
    from series import PrepareSeries

    options = {"validation_fraction": 0.2, "shard_megabytes": 0.001, "processes": 2}
    prepare(PrepareSeries(inputs=tuple(paths), out=str(folder / "data"), **options), summary=False)
    return folder, series


@pytest.fixture
def recipe(prepared, tmp_path, monkeypatch) -> str:
    monkeypatch.delitem(sys.modules, "series_task", raising=False)
    path = tmp_path / "series.toml"
    path.write_text(RECIPE.replace("PATH", str(prepared[0] / "data")))
    yield str(path)
    MODALITIES.pop("series", None)


def test_it_is_prepared_into_shards(prepared):
    folder, _ = prepared
    manifest = Manifest.load(folder / "data")
    assert sum(split.documents for split in manifest.splits.values()) == 49
    assert (manifest.malformed["count"], manifest.facts) == (1, {"steps": 49 * 16})
    assert len(manifest.splits["train"].shards) > 1


def test_it_is_trained_evaluated_and_resumed(recipe, prepared, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", recipe, "--run-dir", str(whole)]) == 0
    found = records(whole, "validation")[-1]
    assert found["rmse"] == math.sqrt(found["loss"])
    assert losses(whole)[-1] < losses(whole)[0]
    said = capsys.readouterr()
    assert "values/s" in said.err
    # Another size of micro-batches and a reading process change no sample.
    train(load_config(recipe, ["--run-dir", str(parts), "--stop-step", "5"]))
    assert train(load_config(str(parts), ["--data.workers", "1"])).steps_done == 7
    assert losses(parts) == losses(whole)
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(parts).items())


def test_every_sample_of_the_validation_split_counts_once(recipe, prepared):
    config = load_config(recipe)
    loader = config.task().make_loader(config.data, split="validation", global_batch_size=8, micro_batch_size=4,
                                       one_pass=True)  # fmt: skip
    batches = list(loader)
    documents = Manifest.load(prepared[0] / "data").splits["validation"].documents
    assert sum(batch.n_tokens for batch in batches) == 12 * documents
    rows = torch.cat([batch.inputs for batch in batches])[:documents, :, 0].numpy() / 2
    series = prepared[1]
    assert all(np.isclose(row, series[:, :12], atol=1e-6).all(1).any() for row in rows)


def test_estimates_ask_it(recipe, capsys):
    assert main(["train", recipe, "--dry-run", "--epochs", "2"]) == 0
    said = capsys.readouterr().out
    assert "epochs = 2" in said
    assert "FLOPs per value" in said
    config = load_config(recipe)
    assert config.modality.size(config.data) == 16 * Manifest.load(config.data.path).splits["train"].documents


def test_an_unknown_field_is_one_line(recipe, tmp_path, capsys):
    assert main(["train", recipe, "--run-dir", str(tmp_path / "run"), "--data.options", "{sclae = 1.0}"]) == 2
    assert "data.options.sclae: the data of this run has no such option; it has scale" in capsys.readouterr().err
