"""Runs of small image classifiers on pictures that are prepared for them."""

from __future__ import annotations

from pathlib import Path

import pictures

RECIPE = """
steps = 6
global_batch_size = 8
device = "cpu"
gc_every = 0

[model]
architecture = "image_classifier"
d_model = 16
n_layers = 2
layers = ["attention"]
mlp_ratio = 2.0
mixers.attention = {headdim = 8, position = "none"}
head = {outputs = 3, hidden = false, dropout = 0.0}
image = {size = 8, patch = 4}

[data]
workers = 0

[data.images]
size = 8
scale = [0.5, 1.0]
mixup = 0.8
cutmix = 1.0
smoothing = 0.1

[objective]
name = "image_classification"

[optimizer]
lr = 3e-3

[ema]
decay = 0.7

[evaluation]
every = 3

[checkpoint]
every = 0

[logging]
every = 1
progress = false
tensorboard = false
picture = false
"""


def write_image_recipe(folder: Path, each: int = 8) -> Path:
    """A recipe and its data: `each` pictures of each of three classes."""
    tree = pictures.write_tree(folder / "tree", pictures.samples(each))
    dataset = pictures.prepare(tree, folder / "pictures", validation_fraction=0.5)
    path = folder / "small.toml"
    path.write_text(RECIPE.replace("[data.images]", f'[data.images]\npath = "{dataset}"'))
    return path
