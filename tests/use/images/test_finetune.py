"""`matmix finetune` of an image classifier: other classes, another size, the normalisation of the run."""

import pictures
import pytest
import torch
from image_runs import write_image_recipe
from runs import records, weights

from matmix.launch.cli import main
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.use.finetuning import finetuning_config

SHORT = ["--device", "cpu", "--epochs", "0", "--steps", "2", "--global-batch-size", "4", "--data.workers", "0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    path = folder / "run"
    train(load_config(str(write_image_recipe(folder)), ["--run-dir", str(path), "--steps", "2"]))
    return path


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    given = [(name, label, data) for name, label, data in pictures.samples(8) if label < 2]
    return str(pictures.prepare(pictures.write_tree(folder / "tree", given), folder / "out", validation_fraction=0.5))


def test_other_classes_and_another_size(run, two_classes, tmp_path, capfd):
    out = tmp_path / "tuned"
    words = ["--data.images.path", two_classes, "--data.images.size", "16", "--run-dir", str(out), *SHORT]
    words += ["--logging.tensorboard", "False", "--optimizer.lr", "1e-9"]
    assert main(["finetune", str(run), "image_classification", *words]) == 0
    config, source = load_config(str(out)), load_config(str(run))
    assert (config.model.image.size, config.data.images.size, config.model.head.outputs) == (16, 16, 2)
    assert config.model.layers == source.model.layers
    assert config.data.images.mean == source.data.images.mean
    assert config.data.images.classes == ("cat", "dog")
    said = capfd.readouterr().err
    assert "interpolated for another size of images: embeddings.positions; new: classifier.output" in said
    tuned = weights(out)
    for name, tensor in weights(run).items():
        if name.startswith("blocks."):
            torch.testing.assert_close(tuned[name], tensor, rtol=0, atol=1e-6)
    assert records(out)[-1]["images"] == 8


def test_the_same_size_unless_another_is_given(run, two_classes):
    config = finetuning_config(str(run), "image_classification", ["--data.images.path", two_classes, *SHORT])
    assert config.model.image.size == config.data.images.size == 8
    config = finetuning_config(
        str(run), "image_classification", ["--data.images.path", two_classes, "--model.image.size", "12", *SHORT]
    )
    assert config.model.image.size == config.data.images.size == 12


def test_what_cannot_be_is_one_line(run, tmp_path, capsys):
    assert main(["finetune", str(run), "image_classification", *SHORT]) == 2
    assert "no pictures given" in capsys.readouterr().err
    assert main(["finetune", str(run), "sequence_classification", *SHORT]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
