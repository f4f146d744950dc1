"""Classes of images: exact costs of hard and soft targets, runs in images, other classes and sizes to go on with."""

import json

import pictures
import pytest
import torch
import torch.nn.functional as F
from failures import each
from image_runs import write_image_recipe
from runs import losses, records, weights

from matmix.data.loading.batch import Batch
from matmix.data.modalities import MODALITIES
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.image_classification import ImageClassification, image_costs
from matmix.use.opening import open_model
from matmix.use.pictures import score_images


def targets(kind: str, n: int = 9, classes: int = 7) -> torch.Tensor:
    """Of `n` images, of which the second and the last have none."""
    generator = torch.Generator().manual_seed(2)
    if kind == "hard":
        labels = torch.randint(classes, (n,), generator=generator)
        labels[[1, -1]] = -100
        return labels
    labels = torch.rand((n, classes), generator=generator).softmax(1)
    labels[[1, -1]] = torch.nan
    return labels


def batch_of(inputs: torch.Tensor, labels: torch.Tensor) -> Batch:
    return Batch(inputs, labels, None, None, 0, None, len(inputs), examples=torch.arange(len(inputs)))


def model(inputs, **_):
    return inputs


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_costs_are_those_of_the_definition(kind):
    labels, logits = targets(kind), 3 * torch.randn(9, 7)
    loss, top1, top5 = image_costs(logits, labels)
    for row in range(9):
        if row in (1, 8):
            assert (loss[row], top1[row], top5[row]) == (0, 0, 0)
            continue
        right = int(labels[row].argmax()) if kind == "soft" else int(labels[row])
        rank = int((logits[row] > logits[row, right]).sum())
        assert (top1[row], top5[row]) == (rank < 1, rank < 5)
        torch.testing.assert_close(loss[row], F.cross_entropy(logits[row], labels[row]))


@each("kind", ["hard", "soft"])
@each("cuts", [(9,), (2, 4, 3), (1, 1, 7)])
def test_the_gradient_is_that_of_the_mean_however_the_batch_is_cut(kind, cuts):
    """A micro-batch may have no label at all."""
    task = ImageClassification(ObjectiveConfig(name="image_classification"))
    features, weight, labels = torch.randn(9, 4), torch.randn(4, 7, requires_grad=True), targets(kind)
    parts = list(zip(features.split(cuts), labels.split(cuts), strict=True))
    count = sum(task.count_targets(batch_of(inputs, part)) for inputs, part in parts)
    assert count == 7
    total = 0.0
    for inputs, part in parts:
        found = task.loss(model, batch_of(inputs @ weight, part))
        (found.total / count).backward()
        total += float(found.loss) / count
    got, weight.grad = weight.grad, None
    kept = [row for row in range(9) if row not in (1, 8)]
    expected = F.cross_entropy(features[kept] @ weight, labels[kept])
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(got, weight.grad, rtol=1e-5, atol=1e-6)


def test_evaluation_has_a_value_for_each_image():
    task = ImageClassification(ObjectiveConfig(name="image_classification"))
    logits, labels = torch.randn(9, 3), targets("hard", classes=3)
    batch = batch_of(logits, labels)
    costs, summed = task.costs(model, batch), task.loss(model, batch)
    assert costs.loss.shape == (9,)
    assert float(costs.loss.sum()) == pytest.approx(float(summed.loss))
    assert costs.sums["top5"].sum() == 7  # of three classes all are among the first five
    torch.testing.assert_close(costs.predicted.values, logits.softmax(1))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_image_recipe(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    train(load_config(str(recipe), ["--run-dir", str(path)]))
    return path


def test_it_counts_images(run):
    record = records(run)[-1]
    assert record["images"] == 6 * 8
    assert record["images_per_second"] > 0
    assert not any(name.startswith("tokens") for name in record)
    assert json.loads((run / "summary.json").read_text())["images"] == 6 * 8
    found = records(run, "validation")[-1]
    assert {"loss", "accuracy", "top5", "ema_loss", "ema_accuracy"} <= found.keys()
    assert found["top5"] == 1.0


def test_resuming_with_mixed_images_is_bit_identical(recipe, run, tmp_path):
    for more in (["--stop-step", "2"], []):
        train(load_config(str(recipe), ["--run-dir", str(tmp_path / "parts"), *more]))
    assert losses(tmp_path / "parts") == losses(run)
    assert records(tmp_path / "parts", "validation") == records(run, "validation")
    expected = weights(run)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "parts").items())


def test_micro_batches_change_nothing(recipe, run, tmp_path):
    train(load_config(str(recipe), ["--run-dir", str(tmp_path / "run"), "--micro-batch-size", "2"]))
    assert losses(tmp_path / "run") == pytest.approx(losses(run), rel=1e-4)


def test_the_run_keeps_what_its_outputs_and_inputs_mean(run):
    images = load_config(str(run)).data.images
    assert images.classes == ("cat", "dog", "owl")
    assert len(images.mean) == len(images.std) == 3
    config = load_config(str(run))
    assert config.task().outputs(config.data).labels == images.classes


def test_other_classes_and_another_size_begin_with_its_weights(recipe, run, tmp_path):
    options = [
        "--init.from",
        str(run),
        "--model.image.size",
        "16",
        "--data.images.size",
        "16",
        "--optimizer.lr",
        "1e-9",
    ]
    config = load_config(str(recipe), ["--run-dir", str(tmp_path / "larger"), *options, "--steps", "1"])
    train(config)
    before, after = weights(run), weights(tmp_path / "larger")
    assert after["embeddings.positions"].shape == (16, 16)
    for name, tensor in before.items():
        if name != "embeddings.positions":
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    corner = after["embeddings.positions"].view(4, 4, 16).unflatten(0, (2, 2)).unflatten(2, (2, 2)).mean((1, 3))
    assert (corner.flatten(0, 1) - before["embeddings.positions"]).abs().mean() < 0.5 * corner.abs().mean()

    from matmix.model import build_model
    from matmix.train.config import InitConfig
    from matmix.train.init import source_of
    from matmix.train.init.start import plan_start

    four = load_config(str(recipe), ["--model.head.outputs", "4"]).model
    shapes = {name: tuple(tensor.shape) for name, tensor in build_model(four, device="meta").state_dict().items()}
    init = InitConfig(from_=str(run))
    start = plan_start(source_of(init), four, shapes, init)
    assert start.new == start.left == ["classifier.output.weight", "classifier.output.bias"]


def test_a_mixture_of_datasets_is_trained_on_resumed_and_scored(recipe, tmp_path):
    others = pictures.samples(12)[4:]
    other = pictures.prepare(
        pictures.write_tree(tmp_path / "tree", others), tmp_path / "other", validation_fraction=0.3
    )
    first = load_config(str(recipe)).data.images.path
    mixture = ["--data.images.path", "", "--data.images.mixture", first, "1", str(other), "3"]
    train(load_config(str(recipe), [*mixture, "--run-dir", str(tmp_path / "whole")]))
    for stop in ("3", "6"):
        options = ["--stop-step", stop, "--checkpoint.every", "3", "--run-dir", str(tmp_path / "run")]
        train(load_config(str(recipe), [*mixture, *options]))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert load_config(str(tmp_path / "run")).data.images.mixture == {first: 1.0, str(other): 3.0}
    scores = score_images(open_model(tmp_path / "run"))
    assert scores.metrics()["loss"] == pytest.approx(records(tmp_path / "run", "validation")[-1]["loss"], rel=1e-5)
    assert MODALITIES["pictures"].names(load_config(str(tmp_path / "run")).data) == ["pictures (25%)", "other (75%)"]
    assert score_images(open_model(tmp_path / "run"), first).pictures == f"{first}, validation split"


def test_outputs_that_are_not_given_are_the_classes_of_the_data(recipe, tmp_path):
    left_out = ["--model.head.outputs", "0", "--run-dir", str(tmp_path / "run"), "--checkpoint.every", "2"]
    train(load_config(str(recipe), [*left_out, "--stop-step", "2"]))
    assert load_config(str(tmp_path / "run")).model.head.outputs == 3
    resumed = train(load_config(str(recipe), left_out))
    train(load_config(str(recipe), ["--run-dir", str(tmp_path / "given")]))
    assert resumed.step == 6
    assert losses(tmp_path / "run")[-4:] == losses(tmp_path / "given")[-4:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--model.head.outputs", "4"],
            r"= 4, but .* has 3 classes \(cat, dog, owl\); set it to 3, or leave it out",
        ),
        (["--data.images.size", "12"], r"data.images.size = 12, but model.image.size = 8"),
        (["--data.images.classes", "cat", "cow", "owl"], "are not those of"),
    ],
)
def test_what_does_not_fit_is_one_line(options, words, recipe, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        train(load_config(str(recipe), ["--run-dir", str(tmp_path / "run"), *options]))
    assert "\n" not in str(error.value)
