"""Pairs of pictures, mixed as timm's Mixup does it."""

import random

import numpy as np
import torch
from failures import each

from matmix.data.config import ImagesConfig
from matmix.data.images.transforms import borrowed_generators, draw_mix, partner_of, seed_generators, soft_target
from matmix.data.rng import MIXING, generator


@each("repeats", [1, 3])
@each("total", [2, 7, 12, 16])
def test_partners_are_pairs_inside_of_a_global_batch(total, repeats):
    for step in range(3):
        samples = range(step * total, (step + 1) * total)
        partners = {n: partner_of(n, total, repeats) for n in samples}
        for n, partner in partners.items():
            assert partner is None or (partner in samples and partner != n and partners[partner] == n)
            if partner is not None and total % repeats == 0:
                assert n // repeats != partner // repeats  # no copy of the same picture
        if total % (2 * repeats) == 0:
            assert None not in partners.values()


CASES = {
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
    "both": {"mixup": 0.8, "cutmix": 1.0},
    "seldom": {"mixup": 0.8, "cutmix": 1.0, "mix_probability": 0.3},
}


@each("case", CASES)
def test_a_pair_is_mixed_as_by_timm(case):
    from timm.data import Mixup  # takes a second, on each worker that collects this file

    config = ImagesConfig(size=24, smoothing=0.1, **CASES[case])
    theirs = Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        prob=config.mix_probability,
        label_smoothing=0.1,
        num_classes=5,
    )
    images, labels = torch.randn(2, 3, 24, 24), torch.tensor([1, 4])
    mixed = 0
    with borrowed_generators():
        for step in range(12):
            mix = draw_mix(config, 3, 2 * step, 2)
            seed_generators(generator(3, 0, MIXING, step))
            expected, target = theirs(images.clone(), labels)
            for n in range(2):
                assert torch.equal(mix.apply(images[n], images[1 - n]), expected[n])
                own = soft_target(int(labels[n]), 5, 0.1) * mix.share
                found = own + soft_target(int(labels[1 - n]), 5, 0.1) * (1 - mix.share)
                assert torch.allclose(found, target[n], atol=1e-6)
            mixed += mix.share != 1.0
    assert mixed == 12 or (case == "seldom" and 0 < mixed < 12)


def test_one_draw_for_a_step_or_for_a_pair():
    both = ImagesConfig(size=24, mixup=0.8, cutmix=1.0)
    pairs = ImagesConfig(size=24, mixup=0.8, cutmix=1.0, mix_mode="pair")
    with borrowed_generators():
        batch = [draw_mix(both, 0, n, 8) for n in range(16)]
        by_pair = [draw_mix(pairs, 0, n, 8) for n in range(16)]
    assert [len(set(batch[:8])), len(set(batch[8:])), len(set(batch))] == [1, 1, 2]
    assert by_pair[::2] == by_pair[1::2]
    assert len(set(by_pair)) == 8


def test_generators_are_given_back():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with borrowed_generators():
        seed_generators(np.random.default_rng(0))
        random.random(), np.random.rand(), torch.rand(1)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
