"""The recipes of image classifiers at full size: they build, and have the parameters that they say."""

import re

import pytest
from failures import each

from matmix.launch.cli import main
from matmix.launch.lab.compare.config import read_comparison
from matmix.launch.lab.compare.width import matched
from matmix.model import count_parameters, flops_per_image, flops_per_token
from matmix.train.recipe import load_config
from matmix.train.recipe_files import bundled_recipes, find_recipe

PUBLISHED = {
    "vit_b_imagenet": 87,
    "s4_vit_b_imagenet": 89,
    "hyena_vit_b_imagenet": 88,
    "mamba_vit_b_imagenet": 89,
    "hydra_vit_b_imagenet": 91,
    "deit_b_imagenet": 86,
}
"""Millions of parameters."""


HYDRA_TABLE = {"lr": 1e-3, "decay": 0.05, "crop": 0.9}
DEIT = {"lr": 1e-3, "decay": 0.05, "crop": 0.875}  # 5e-4 for a batch of 512
SETTINGS = {
    "vit_b_imagenet": HYDRA_TABLE,
    "s4_vit_b_imagenet": {**HYDRA_TABLE, "decay": 0.03},
    "hyena_vit_b_imagenet": {**HYDRA_TABLE, "lr": 2e-4, "decay": 0.01},
    "mamba_vit_b_imagenet": HYDRA_TABLE,
    "hydra_vit_b_imagenet": HYDRA_TABLE,
    "vim_s_imagenet": HYDRA_TABLE,
    "deit_b_imagenet": DEIT,
    "lion_imagenet": DEIT,
}
"""What differs between the recipes: learning rate, weight decay, share of the picture that the evaluation sees."""
IMAGES, EPOCHS = 1_281_167, 300


@each("name", [name for name in bundled_recipes() if name.endswith("_imagenet")])
def test_training_settings_are_those_of_the_table(name):
    entries = read_comparison(name).entries if name == "lion_imagenet" else ()
    for config in (load_config(name), *(entry.config for entry in entries)):
        images, schedule, per_epoch = config.data.images, config.schedule, IMAGES / config.global_batch_size
        found = {"lr": config.optimizer.lr, "decay": config.optimizer.weight_decay, "crop": images.crop}
        assert found == SETTINGS[name]
        assert config.global_batch_size == 1024
        assert config.steps / per_epoch == pytest.approx(EPOCHS, abs=1e-3)
        assert schedule.warmup / per_epoch == pytest.approx(5, abs=1e-3)
        assert (schedule.name, config.optimizer.name) == ("cosine", "adamw")
        assert schedule.final * config.optimizer.lr == pytest.approx(1e-5)
        assert (images.size, config.model.image.size, config.model.image.patch) == (224, 224, 16)
        assert (images.mixup, images.cutmix, images.erasing, images.smoothing) == (0.8, 1.0, 0.25, 0.1)
        assert images.augment == "rand-m9-mstd0.5-inc1"
        assert (config.model.drop_path, config.ema.decay) == (0.1, 0.99996)


@each("name", [name for name in bundled_recipes() if name.endswith("_imagenet")])
def test_sizes_are_the_published_and_the_stated_ones(name):
    config = load_config(name)
    found = count_parameters(config.model) / 1e6
    if name in PUBLISHED:
        assert found == pytest.approx(PUBLISHED[name], rel=0.01)
    assert f"{found:.2f}M" in re.sub(r"\s*\n# ", " ", find_recipe(name).read_text())
    assert config.model.image.size == config.data.images.size
    assert config.model.image.side == 14
    # The cost of an image does not depend on data.seqlen, of which images know nothing.
    positions = config.model.image.length
    assert flops_per_image(config.model) == flops_per_token(config.model, 7) * positions > 9e9


def test_lion_beside_deit_in_three_sizes():
    variants = read_comparison("lion_imagenet").by_variant()
    for comparison, millions in zip(variants, (5.72, 22.05, 86.57), strict=True):
        sizes = {entry.name: count_parameters(entry.config.model) / 1e6 for entry in comparison.entries}
        del sizes["no mixer"]  # which is made as large only once the data is known
        assert set(sizes) == {"LION-lit", "LION-D", "LION-D snake", "LION-S", "LION-S snake", "DeiT"}
        assert sizes == pytest.approx(dict.fromkeys(sizes, millions), rel=0.01)


def test_the_small_comparison_is_planned_without_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "mnist_small", "--dry-run"]) == 0
    text = capsys.readouterr().out
    entries = matched(read_comparison("mnist_small")).entries
    assert all(entry.label in text for entry in entries)
    sizes = {entry.name: entry.parameters for entry in entries}
    assert {"Hydra", "LION-S snake", "attention", "S4D", "Mamba (causal)", "no mixer"} <= set(sizes)
    assert sizes == pytest.approx(dict.fromkeys(sizes, sizes["Hydra"]), rel=0.02)
    for mixer in ("Hydra", "LION-S"):
        orders = {name: entry.config.model for name, entry in ((e.name, e) for e in entries) if mixer in name}
        assert sorted(model.image.scan for model in orders.values()) == ["both", "row", "snake"]
        assert len({model.mixer_names()[0] for model in orders.values()}) == 1
