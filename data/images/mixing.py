"""Mixup and CutMix of the pictures of a global batch, the same however it is divided over ranks and micro-batches.

In a global batch of G samples, position i is mixed with i + r or i - r: stretches of r = `repeats` positions (1 without
repeated augmentation, so that neighbours form pairs) are paired, and copies of a picture never meet each other. A
position without a partner (at the end of an odd batch) stays as it is. How a pair is mixed is drawn from (seed, step),
or with mode "pair" from (seed, number of the pair). The formulas are timm's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from matmix.data.config import ImagesConfig
from matmix.data.images.randomness import seed_generators
from matmix.data.rng import MIXING, generator


@dataclass(frozen=True, slots=True)
class Mix:
    """How one picture is mixed with its partner."""

    share: float
    """Of the picture itself in the result and in the target; 1 = not mixed."""
    box: tuple[int, int, int, int] | None = None
    """CutMix: top, bottom, left and right of what comes from the partner. None = mixup."""

    def apply(self, image: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        """The mixture of two pictures, each (C, H, W)."""
        if self.box is None:
            return image * self.share + partner * (1.0 - self.share)
        top, bottom, left, right = self.box
        mixed = image.clone()
        mixed[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
        return mixed


def partner_of(sample: int, global_batch: int, repeats: int) -> int | None:
    """The number of the sample that is mixed with `sample`, in the same global batch."""
    place = sample % global_batch
    other = place + repeats if place % (2 * repeats) < repeats else place - repeats
    return sample - place + other if other < global_batch else None


def draw_mix(config: ImagesConfig, seed: int, sample: int, global_batch: int) -> Mix:
    """How `sample` and its partner are mixed. To be called where the global generators are borrowed."""
    from timm.data.mixup import cutmix_bbox_and_lam

    item = sample // global_batch
    if config.mix_mode == "pair":
        partner = partner_of(sample, global_batch, config.repeats)
        item = sample if partner is None else min(sample, partner)
    seed_generators(generator(seed, 0, MIXING, item))
    if np.random.rand() >= config.mix_probability:
        return Mix(1.0)
    cut = config.cutmix > 0
    if config.mixup > 0 and config.cutmix > 0:
        cut = np.random.rand() < config.mix_switch
    alpha = config.cutmix if cut else config.mixup
    share = float(np.random.beta(alpha, alpha))
    if not cut:
        return Mix(share)
    box, share = cutmix_bbox_and_lam((config.channels, config.size, config.size), share)
    return Mix(float(share), tuple(int(edge) for edge in box))


def soft_target(label: int, classes: int, smoothing: float) -> torch.Tensor:
    """float32 (classes,): 1 for the class, of which `smoothing` is spread evenly over all."""
    target = torch.full((classes,), smoothing / classes)
    target[label] = 1.0 - smoothing + smoothing / classes
    return target
