"""Classes of whole generated samples: a model learns them, and says beside them what a constant answer scores."""

import dataclasses

import pytest
from runs import records

from matmix.train.loop import train
from matmix.train.recipe import config_from_dict

RECIPE = {
    "steps": 20,
    "global_batch_size": 32,
    "model": {
        "architecture": "sequence_classifier",
        "d_model": 16,
        "n_layers": 1,
        "layers": ["convolution"],
        "type_vocab_size": 0,
        "head": {"pooling": "mean", "hidden": False, "dropout": 0.0},
    },
    "data": {
        "packing": "rows",
        "seqlen": 12,
        "workers": 0,
        "synthetic": {"task": "listops", "depth": 1, "arguments": 2, "validation_samples": 100},
    },
    "objective": {"name": "sample_classification"},
    "optimizer": {"lr": 1e-2},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 0},
    "logging": {"every": 10, "tensorboard": False},
}


def config_of(run_dir, **data):
    synthetic = {**RECIPE["data"]["synthetic"], **data.pop("synthetic", {})}
    return config_from_dict(
        {**RECIPE, "run_dir": str(run_dir), "data": {**RECIPE["data"], **data, "synthetic": synthetic}}, "here"
    )


def test_the_class_of_a_sample_is_learned(tmp_path):
    config = config_of(tmp_path / "run")
    metrics = train(config).metrics
    assert 0.1 < metrics["control_accuracy"] < 0.2  # minima are often small, maxima large
    losses = [record["loss"] for record in records(tmp_path / "run") if "loss" in record]
    assert metrics["loss"] < losses[0]
    assert config.task().flops(config.model, 12) > 0


def test_pictures_of_paths_train_too(tmp_path):
    synthetic = {"task": "pathfinder", "dashes": 3, "distractors": 0, "validation_samples": 8}
    config = config_of(tmp_path / "run", seqlen=401, synthetic=synthetic)
    metrics = train(dataclasses.replace(config, steps=1, global_batch_size=4)).metrics
    assert metrics["control_accuracy"] == 0.5


def test_samples_with_several_answers_are_refused(tmp_path):
    config = config_of(tmp_path / "run", seqlen=24, synthetic={"task": "mqar", "items": 2})
    with pytest.raises(ValueError, match="have no answer that is one of their whole; set"):
        train(config)
