"""The loss of image classifiers without mixing, against a model that has constants for mixers."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from failures import each
from image_runs import write_image_recipe
from runs import records
from torch import nn
from torch.nn import functional as F

from matmix.data.loading.batch import Batch
from matmix.model import build_model, initialize
from matmix.model.calls import Called
from matmix.train.evaluators.ablation import mixing_metrics
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.image_classification import ImageClassification


class Constant(Called):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x, cu_seqlens=None, max_seqlen=None):
        return self.value.to(x.dtype).expand_as(x)

    def forward_in_orders(self, x, orders):
        return self.forward(x)


def engine_of(model):
    return SimpleNamespace(module=model, model=model, device=torch.device("cpu"), sum_over_batches=lambda sums: sums)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_image_recipe(tmp_path_factory.mktemp("recipe"), each=4)


def batch_of(images: torch.Tensor, labels: list[int]) -> Batch:
    nothing = dict.fromkeys(("cu_seqlens", "attention_mask", "select"))
    return Batch(inputs=images, labels=torch.tensor(labels), max_seqlen=0, n_tokens=len(images), **nothing)


@each("scan", ["row", "snake"])
@each("token", ["none", "first"])
def test_the_loss_without_mixing_is_that_of_constants_for_mixers(scan, token, recipe):
    changes = ["--model.image.scan", scan, "--model.image.class_token", token, "--model.layer_scale", "0.5"]
    model = build_model(load_config(str(recipe), changes).model, device="cpu").eval()
    initialize(model, 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    images = torch.randn(6, 3, 8, 8, generator=generator)
    labels = [0, 2, -100, 1, 1, -100]  # those without a label fill up the last batch
    batches = [batch_of(images[:4], labels[:4]), batch_of(images[4:], labels[4:])]
    there = torch.tensor(labels) >= 0
    without, outputs = copy.deepcopy(model), []
    hooks = [
        block.register_forward_pre_hook(lambda block, inputs: outputs.append(block.mix(*inputs)))
        for block in model.blocks
    ]
    with torch.no_grad():
        plain = F.cross_entropy(model(images)[there], torch.tensor(labels)[there]).item()
        for hook in hooks:
            hook.remove()
        for block, y in zip(without.blocks, outputs, strict=True):
            block.scale_mixer = nn.Identity()
            block.mixer = Constant(y[there].double().mean((0, 1)))
        expected = F.cross_entropy(without(images)[there], torch.tensor(labels)[there]).item()
    found = mixing_metrics(engine_of(model), ImageClassification(ObjectiveConfig()), lambda: batches)
    assert abs(expected - plain) > 1e-2
    assert found["loss_without_mixing"] == pytest.approx(expected, rel=1e-5)
    assert found["mixing_gain"] == pytest.approx(expected - plain, abs=1e-5)


def test_runs_measure_it_with_both_kinds_of_weights(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    train(load_config(str(recipe), ["--run-dir", str(run), "--steps", "2", "--evaluation.every", "2"]))
    found = records(run, "validation")[-1]
    assert found["loss_without_mixing"] - found["loss"] == pytest.approx(found["mixing_gain"], abs=1e-5)
    assert "ema_mixing_gain" in found
    other = tmp_path / "other"
    words = ["--run-dir", str(other), "--steps", "2", "--evaluation.every", "2", "--evaluation.ablation-batches", "0"]
    train(load_config(str(recipe), words))
    assert "mixing_gain" not in records(other, "validation")[-1]
