"""Masked-language-model batches: which positions are predicted, and what the model sees there.

BERT's rule (Devlin et al. 2018, section 3.1) with the rate left open: each ordinary token of a sample is chosen with
`probability`; of the chosen ones `mask_share` are replaced by the mask token, `random_share` by a token drawn from the
ordinary vocabulary (never a special or unused id), and the rest are left as they are. Special tokens and padding are
never chosen.

The draws of a sample come from a generator keyed by (seed, epoch, sample), three numbers for each position in order, so
neither rank nor worker nor batch size nor the other samples of the batch change them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matmix.data.rng import MASKS, generator

IGNORED = -100
"""Label of a position that is not predicted (the `ignore_index` of torch's cross-entropy)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingConfig:
    probability: float = 0.30
    """Share of the ordinary tokens that are chosen for prediction."""
    mask_share: float = 0.8
    """Share of the chosen tokens that become the mask token."""
    random_share: float = 0.1
    """Share of the chosen tokens that become a random ordinary token; the rest stay as they are."""

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"masking probability must be above 0 and at most 1, got {self.probability}")
        for name in ("mask_share", "random_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"masking {name} must be between 0 and 1, got {getattr(self, name)}")
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"masking mask_share + random_share must be at most 1, got {self.mask_share} + {self.random_share}"
            )


class Masker:
    """Applies a `MaskingConfig` to whole micro-batches.

    special_ids: ids that are never chosen. mask_id: the id put in. ordinary_ids: int array of the ids
    that a random replacement may be. vocab_size: every token id is below it.
    """

    def __init__(
        self,
        config: MaskingConfig,
        *,
        seed: int,
        mask_id: int | None,
        special_ids: list[int],
        ordinary_ids: np.ndarray,
        vocab_size: int,
    ) -> None:
        if mask_id is None:
            raise ValueError(
                "masked-LM batches need a mask token, and this tokenizer has none: "
                "prepare the data with a tokenizer that has one ([MASK] or <mask>)"
            )
        if not 0 <= mask_id < vocab_size:
            raise ValueError(f"the mask token has id {mask_id}, outside the vocabulary of {vocab_size}")
        if config.random_share > 0 and len(ordinary_ids) == 0:
            raise ValueError("masking with random replacements needs a vocabulary with ordinary (not special) tokens")
        self.config = config
        self.seed = seed
        self.mask_id = mask_id
        self.ordinary_ids = np.asarray(ordinary_ids, dtype=np.int64)
        self.choosable = np.ones(vocab_size, dtype=bool)
        self.choosable[[i for i in special_ids if 0 <= i < vocab_size]] = False
        self.choosable[mask_id] = False

    def apply(
        self, tokens: np.ndarray, counts: np.ndarray, epochs: np.ndarray, samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks a micro-batch.

        tokens int64 (B, L), counts int64 (B,) = real tokens in each row, epochs and samples (B,) name
        each row. Returns (input_ids, labels), both int64 (B, L); labels are `IGNORED` where nothing is
        predicted.
        """
        chosen_at = self.config.probability
        random_at = self.config.mask_share + self.config.random_share
        draws = np.ones((*tokens.shape, 3))  # 1.0 is never chosen: the draws lie in [0, 1)
        for row, (count, epoch, sample) in enumerate(
            zip(counts.tolist(), epochs.tolist(), samples.tolist(), strict=True)
        ):
            generator(self.seed, epoch, MASKS, sample).random(out=draws[row, :count])
        rows, columns = np.nonzero((draws[..., 0] < chosen_at) & self.choosable[tokens])
        originals, action, pick = tokens[rows, columns], draws[rows, columns, 1], draws[rows, columns, 2]
        random_ids = originals
        if len(self.ordinary_ids):
            random_ids = self.ordinary_ids[(pick * len(self.ordinary_ids)).astype(np.int64)]
        seen = np.where(action < random_at, random_ids, originals)
        seen = np.where(action < self.config.mask_share, self.mask_id, seen)
        input_ids, labels = tokens.copy(), np.full_like(tokens, IGNORED)
        input_ids[rows, columns] = seen
        labels[rows, columns] = originals
        return input_ids, labels
