"""Hydra: the quasiseparable mixer (arXiv 2407.09941), bidirectional, linear in the length.

Parameters have the names and shapes of the authors' module, so that their checkpoints load by renaming only.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from matmix.model.mixers.base import recomputed
from matmix.model.mixers.scans.scan_block import BidirectionalScanBlock, ScanBlockConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraConfig(ScanBlockConfig):
    """Options of the Hydra mixer."""

    learnable_init_states: bool = False
    """Learn the state that both scans start from."""
    dt_limit_low: float = 0.0
    """Step sizes are never below this."""
    dt_limit_high: float = 0.0
    """Step sizes are never above this; 0 means no limit."""
    recompute: bool = False
    """Compute the convolution, step sizes and gated norm again in the backward pass instead of keeping them;
    about 39 % less activation memory."""


class Hydra(BidirectionalScanBlock):
    """in_proj -> [z | x B C of both directions | dt of both] -> conv + silu -> quasiseparable scan -> gated
    norm -> out_proj.

    M = tril_strict(G_f * L_f) + triu_strict(G_b * L_b) + diag(D); learned initial states, which add a term of their
    own, are not part of it.
    """

    Config = HydraConfig
    diagonal = "projected"
    shift = True

    def __init__(self, d_model: int, config: HydraConfig, **options):
        super().__init__(d_model, config, **options)
        self.recompute = config.recompute  # turned off where whole blocks are recomputed

    @classmethod
    def check(cls, d_model: int, config: HydraConfig) -> None:
        super().check(d_model, config)
        cls.require(config.dt_limit_high >= 0, config, "dt_limit_high", "must be 0 (none) or more")
        low, high = cls.dt_limits(config)
        otherwise = f"must not be above dt_limit_high = {config.dt_limit_high}, or every step size would be the same"
        cls.require(low < math.inf and low <= high, config, "dt_limit_low", otherwise)

    @classmethod
    def dt_limits(cls, config: HydraConfig) -> tuple[float, float]:
        return config.dt_limit_low, config.dt_limit_high if config.dt_limit_high > 0 else math.inf

    @property
    def layer_options(self) -> dict[str, Any]:
        states = self.init_states if self.config.learnable_init_states else None
        return {"initial_states": states, "recompute": self.recompute}

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        projected = self.in_proj(x)
        if not self.recompute:
            return self.mix_projected(projected, cu_seqlens)
        contexts = partial(create_selective_checkpoint_contexts, save_scan_only)
        return recomputed(self.mix_projected, projected, cu_seqlens, context_fn=contexts)


def save_scan_only(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keeps the output of the scan, which costs most to compute again, and recomputes the rest."""
    # By name: an exported model that runs without the package has no such ops and computes the scan again too.
    kept = str(op) in ("matmix.conv_and_scan.default", "matmix.quasiseparable_scan.default")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
