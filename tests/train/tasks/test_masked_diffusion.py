"""The loss of masked diffusion is a bound on the likelihood, the same however batches are cut and runs are stopped."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from failures import each
from runs import losses, records, run_recipe

from matmix.data.loading.batch import Batch, selecting
from matmix.data.loading.masking import IGNORED
from matmix.data.manifest import Manifest
from matmix.model import build_model, initialize
from matmix.train.config import RampConfig
from matmix.train.loaders import make_loader
from matmix.train.recipe import load_config
from matmix.train.tasks import ObjectiveConfig, make_task

DIFFUSION = ["--objective.name", "masked_diffusion"]
LENGTH, VOCAB, MASK = 3, 2, 2
TEXTS = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)))
TASK = make_task(ObjectiveConfig(name="masked_diffusion"), load_config("debug_hydra", DIFFUSION).model)


def conditionals(joint):
    """A model that knows a distribution over `TEXTS`: log p(token at a place | the tokens that are seen)."""

    def model(inputs, *, select, readout, **_):
        found = torch.zeros(inputs.numel(), VOCAB)
        for place in select.tolist():
            row = inputs[place // LENGTH].numpy()
            fits = ((row == MASK) | (row == TEXTS)).all(1)
            for token in range(VOCAB):
                also = fits & (TEXTS[:, place % LENGTH] == token)
                found[place, token] = math.log(joint[also].sum() / joint[fits].sum())
        return readout(found[select], torch.eye(VOCAB), None)

    return model


def expected_loss(model, text) -> float:
    """The mean of the loss over all masks and rates: a polynomial in the rate, which these nodes integrate exactly."""
    nodes, shares = np.polynomial.legendre.leggauss(LENGTH + 1)
    total = 0.0
    for rate, share in zip((nodes + 1) / 2, shares / 2, strict=True):
        for hidden in itertools.product([False, True], repeat=LENGTH):
            inputs, labels = np.where(hidden, MASK, text)[None], np.where(hidden, text, IGNORED)[None]
            weights = torch.full((1, LENGTH), 1 / rate)
            batch = selecting(Batch(torch.from_numpy(inputs), torch.from_numpy(labels), weights=weights))
            count = sum(hidden)
            loss = float(TASK.loss(model, batch).loss) / TASK.count_targets(batch)
            total += share * rate**count * (1 - rate) ** (LENGTH - count) * loss
    return total


def test_the_bound_is_the_likelihood_where_the_model_knows_the_distribution():
    skewed = np.random.default_rng(0).dirichlet(np.ones(len(TEXTS)))
    for joint in (np.full(len(TEXTS), 1 / len(TEXTS)), skewed):
        model = conditionals(joint)
        for text, probability in zip(TEXTS, joint, strict=True):
            assert LENGTH * expected_loss(model, text) == pytest.approx(-math.log(probability), rel=1e-5)
    assert expected_loss(conditionals(np.full(len(TEXTS), 1 / len(TEXTS))), TEXTS[0]) == pytest.approx(math.log(VOCAB))


def test_a_model_whose_predictions_do_not_agree_is_bounded():
    """What it writes, one token after another in a random order, has a likelihood; no text's bound is below it."""
    scores = torch.randn(VOCAB + 1, VOCAB + 1, VOCAB + 1, LENGTH, VOCAB, generator=torch.Generator().manual_seed(0))
    scores = scores.double().log_softmax(-1)

    def model(inputs, *, select, readout, **_):
        found = torch.zeros(inputs.numel(), VOCAB, dtype=torch.float64)
        found[select] = scores[tuple(inputs[0])][select]
        return readout(found[select], torch.eye(VOCAB, dtype=torch.float64), None)

    total = 0.0
    for text in TEXTS:
        probability = 0.0
        for order in itertools.permutations(range(LENGTH)):
            seen, logarithm = [MASK] * LENGTH, 0.0
            for place in order:
                logarithm += float(scores[(*seen, place, text[place])])
                seen[place] = text[place]
            probability += math.exp(logarithm) / math.factorial(LENGTH)
        total += probability
        assert LENGTH * expected_loss(model, text) > -math.log(probability) + 1e-3
    assert total == pytest.approx(1)


def test_the_loss_is_the_same_however_the_batch_is_cut(dataset):
    config = load_config("debug_hydra", ["--data.path", dataset, *DIFFUSION, "--micro-batch-size", "8"])
    task, model = config.task(), build_model(dataclasses.replace(config.model, vocab_size=320)).eval()
    initialize(model, 0)
    batch = next(iter(make_loader(config, "train", 0, 1)))
    logits = model(batch.inputs, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen).float()
    options = {"ignore_index": IGNORED, "reduction": "none"}
    cost = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), **options)
    whole = task.loss(model, batch)
    assert whole.loss.item() == pytest.approx((cost * batch.weights.flatten()).sum().item(), rel=1e-5)
    assert task.costs(model, batch).loss.sum().item() == pytest.approx(whole.loss.item(), rel=1e-5)
    targets, parts, sums = task.count_targets(batch), 0, torch.zeros(2)
    for ranks, micro in ((1, 2), (2, 1)):
        own = dataclasses.replace(config, micro_batch_size=micro)
        for rank in range(ranks):
            loader = make_loader(own, "train", rank, ranks)
            for part in itertools.islice(loader, loader.micro_batches_per_step):
                parts += task.count_targets(part)
                found = task.loss(model, part)
                sums += torch.stack([found.loss, found.sums["accuracy"]]).detach()
    assert parts == 2 * targets
    expected = torch.stack([whole.loss, whole.sums["accuracy"]])
    torch.testing.assert_close(sums / 2, expected, rtol=1e-5, atol=1e-5)


@each("layer", ["hydra", "lion_s", "attention"])
@pytest.mark.slow
def test_a_run_resumes_exactly_and_its_bound_falls(layer, dataset, tmp_path):
    options = [*DIFFUSION, "--model.layers", layer, "--steps", "40", "--checkpoint.every", "0"]
    options += ["--model.mixers.lion_s.headdim", "16"] if layer == "lion_s" else []
    run_recipe("debug_hydra", dataset, tmp_path / "whole", *options)
    for stop in (["--stop-step", "7"], []):
        run_recipe("debug_hydra", dataset, tmp_path / "parts", *options, *stop)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    first, *_, last = records(tmp_path / "whole", "validation")
    assert last["loss"] < first["loss"] < math.log(320) + 0.2
    assert records(tmp_path / "parts", "validation")[-1]["loss"] == last["loss"]
    info = Manifest.load(dataset).splits["validation"]
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) * info.tokens / info.bytes)


@each(
    "words",
    [
        ["--objective.masking.probability", "0.5"],
        ["--objective.evaluation_masking.mask_share", "1.0", "--objective.evaluation_masking.random_share", "0.0"],
    ],
)
def test_shares_of_masked_lm_are_refused(words):
    with pytest.raises(
        ValueError, match=r"ramp\.masking are for masked_lm: masked_diffusion draws a rate .* leave them out"
    ):
        load_config("debug_hydra", [*DIFFUSION, *words])


def test_a_ramp_of_shares_is_refused_where_they_are_not_used():
    config, ramp = load_config("debug_hydra", DIFFUSION), RampConfig(tokens=1024, masking=(0.4,))
    with pytest.raises(ValueError, match=r"ramp\.masking are for masked_lm"):
        ramp.stages(config)
    with pytest.raises(ValueError, match=r"ramp\.masking are for masked_lm: causal_lm hides no token; leave them out"):
        ramp.stages(load_config("debug_mru"))
    assert [one.objective.masking.probability for one in ramp.stages(load_config("debug_hydra"))] == [0.4, 0.3]


@each("least", ["0.0", "2.0"])
def test_a_least_rate_that_cannot_be_is_one_line(least):
    with pytest.raises(ValueError, match=r"objective\.options\.least must be above 0 and at most 1, got") as error:
        load_config("debug_hydra", [*DIFFUSION, "--objective.options", f"{{least = {least}}}"])
    assert "\n" not in str(error.value)
