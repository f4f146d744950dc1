"""An image classifier that is trained for a few steps."""

import pytest
from image_runs import write_image_recipe

from matmix.train.loop import train
from matmix.train.recipe import load_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    path = folder / "run"
    train(load_config(str(write_image_recipe(folder)), ["--run-dir", str(path)]))
    return path
