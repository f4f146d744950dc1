"""Pixels of hidden parts of images: nothing of them is seen, masks depend on (seed, sample) alone, and what was learned
goes on as a classifier."""

import dataclasses

import pictures
import pytest
import torch
from image_runs import write_image_recipe
from runs import losses, records, weights

from matmix.model import build_model, initialize
from matmix.model.images.patches import cut_patches
from matmix.train.loaders import make_loader
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.train.tasks.masked_image import from_patches

MASKED = ["--model.architecture", "masked_image", "--objective.name", "masked_image"]
MASKED += ["--objective.options", "{square = 4, ratio = 0.5}", "--data.images.mixup", "0", "--data.images.cutmix", "0"]
MASKED += ["--data.images.smoothing", "0"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Images of 8 x 8 pixels, patches of 4 x 4, without a table [model.head], which this model has no use for."""
    path = write_image_recipe(tmp_path_factory.mktemp("images"))
    kept = [line for line in path.read_text().splitlines() if not line.startswith("head = ")]
    (path.parent / "masked.toml").write_text("\n".join(kept))
    return str(path.parent / "masked.toml"), str(path)


def config_of(recipe, *options):
    return load_config(recipe[0], [*MASKED, *options])


@pytest.mark.parametrize("image", [{}, {"stem": "conv"}, {"class_token": "middle", "scan": "snake"}])
def test_no_hidden_pixel_is_seen(image, recipe):
    config = config_of(recipe).model
    model = build_model(dataclasses.replace(config, image=dataclasses.replace(config.image, **image))).eval()
    initialize(model, 0)
    images, masked = torch.randn(2, 3, 8, 16), torch.zeros(2, 2, 4, dtype=torch.bool)
    masked[:, 0, 1] = masked[0, 1, 3] = True
    outputs = model(images, masked=masked)
    assert outputs.shape == (2, 8, 3 * 4 * 4)
    changed = torch.where(
        masked.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None], torch.randn_like(images), images
    )
    assert torch.equal(model(changed, masked=masked), outputs)
    assert not torch.allclose(model(changed), outputs)
    select = torch.tensor([1, 9])
    torch.testing.assert_close(model(images, masked=masked, select=select), outputs.flatten(0, 1)[select])
    with pytest.raises(ValueError, match="are no whole patches"):
        model(images, masked=torch.zeros(2, 3, 3, dtype=torch.bool))


def test_larger_squares_are_several_patches(recipe):
    config = config_of(recipe).model
    model = build_model(config).eval()
    initialize(model, 0)
    images, squares = torch.randn(1, 3, 16, 16), torch.tensor([[[True, False], [False, False]]])
    patches = squares.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.equal(model(images, masked=squares), model(images, masked=patches))


def test_patches_are_put_together_again():
    images = torch.randn(2, 3, 8, 12)
    assert torch.equal(from_patches(cut_patches(images, 4), images, 4), images)


def test_masks_are_those_of_the_sample(recipe):
    """For any ranks, micro-batches and reading processes; each image has as many."""
    config = config_of(recipe, "--global-batch-size", "4")

    def batches(split, ranks=1, micro=4, workers=0):
        own = dataclasses.replace(config, micro_batch_size=micro)
        own = dataclasses.replace(own, data=dataclasses.replace(own.data, workers=workers))
        loaders = [make_loader(own, split, rank, ranks) for rank in range(ranks)]
        streams = [iter(loader) for loader in loaders]
        per_rank = 4 // (micro * ranks)
        found = [next(stream) for _ in range(5) for stream in streams for _ in range(per_rank)]
        for loader in loaders:
            loader.close()
        return torch.cat([batch.extra["masked"] for batch in found]), torch.cat([batch.inputs for batch in found])

    masked, images = batches("train")
    assert masked.flatten(1).sum(1).tolist() == [2] * 20
    assert len({tuple(row.tolist()) for row in masked.flatten(1)}) > 3
    for options in ({"ranks": 2, "micro": 1}, {"workers": 1, "micro": 2}):
        again, same = batches("train", **options)
        assert torch.equal(again, masked)
        assert torch.equal(same, images)


def test_the_loss_is_that_of_the_hidden_pixels_however_the_batch_is_cut(recipe):
    config = config_of(recipe)
    task, model = config.task(), build_model(config.model)
    initialize(model, 0)
    batch = next(iter(make_loader(config, "train", 0, 1)))
    pixels = batch.extra["masked"].repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None].expand_as(batch.inputs)
    outputs = from_patches(model(batch.inputs, masked=batch.extra["masked"]), batch.inputs, 4)
    expected = (outputs - batch.inputs)[pixels].abs().mean()
    whole = task.loss(model, batch)
    assert float(whole.loss) / task.count_targets(batch) == pytest.approx(expected.item(), rel=1e-5)
    guess = batch.inputs.masked_fill(pixels, torch.nan).nanmean((2, 3), keepdim=True)
    guess = (guess - batch.inputs)[pixels].abs().mean()
    assert float(whole.sums["mean_colour_error"]) / task.count_targets(batch) == pytest.approx(guess.item(), rel=1e-5)
    parts = [
        dataclasses.replace(
            batch, inputs=batch.inputs[own], labels=batch.labels[own], extra={"masked": batch.extra["masked"][own]}
        )
        for own in (slice(0, 3), slice(3, 8))
    ]
    assert sum(float(task.loss(model, part).loss) for part in parts) == pytest.approx(float(whole.loss), rel=1e-5)


def test_a_run_learns_of_real_pictures(recipe, tmp_path):
    """Handwritten digits, of which half of the 16 squares are hidden: better than the mean of what is seen."""
    digits = pictures.prepare("sklearn:digits", tmp_path / "digits", validation_fraction=0.1)
    options = ["--data.images.path", str(digits), "--data.images.channels", "1", "--model.image.channels", "1"]
    options += ["--model.image.patch", "2", "--objective.options", "{square = 2, ratio = 0.5}", "--model.d-model", "32"]
    options += ["--data.images.train-crop", "none", "--data.images.crop", "1.0", "--data.images.hflip", "0"]
    options += ["--steps", "60", "--global-batch-size", "16", "--optimizer.lr", "5e-3", "--evaluation.batches", "4"]
    train(config_of(recipe, *options, "--evaluation.every", "0", "--run-dir", str(tmp_path / "run")))
    last = records(tmp_path / "run", "validation")[-1]
    assert last["loss"] < 0.75 * last["mean_colour_error"]
    assert records(tmp_path / "run")[-1]["images"] == 60 * 16


def test_a_run_resumes_and_goes_on_as_a_classifier(recipe, tmp_path):
    train(config_of(recipe, "--run-dir", str(tmp_path / "whole")))
    for stop in (["--stop-step", "3"], []):
        train(config_of(recipe, "--run-dir", str(tmp_path / "parts"), *stop))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    last = records(tmp_path / "whole", "validation")[-1]
    assert {"loss", "mean_colour_error", "ema_loss"} <= last.keys()
    begun = ["--init.from", str(tmp_path / "whole"), "--steps", "1", "--optimizer.lr", "1e-9"]
    train(load_config(recipe[1], [*begun, "--run-dir", str(tmp_path / "classifier")]))
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "classifier")
    for name, tensor in before.items():
        if not name.startswith(("decoder.", "mask_token")):
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)


def test_squares_that_do_not_fit_are_one_line(recipe):
    with pytest.raises(ValueError, match=r"square = 5 does not divide data.images.size = 8") as error:
        make_loader(config_of(recipe, "--objective.options", "{square = 5}"), "train", 0, 1)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="ratio must lie between 0 and 1"):
        config_of(recipe, "--objective.options", "{ratio = 1.0}")
