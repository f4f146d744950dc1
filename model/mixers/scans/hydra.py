"""Hydra: the quasiseparable mixer (arXiv 2407.09941), bidirectional, linear in the length.

Parameters have the names and shapes of the authors' module, so that their checkpoints load by renaming only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from matmix.kernels.checks import transformed
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

    def __init__(self, d_model: int, config: HydraConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.recompute = config.recompute  # turned off where whole blocks are recomputed

    def add_initial_states(self) -> None:
        config = self.config
        if config.learnable_init_states:
            self.init_states = nn.Parameter(torch.empty(self.nheads, config.headdim, config.d_state))

    @classmethod
    def check(cls, d_model: int, config: HydraConfig) -> None:
        super().check(d_model, config)
        low, high = config.dt_limit_low, config.dt_limit_high
        if not (low < math.inf and low <= (high if high > 0 else math.inf)):
            raise ValueError(
                f"model.mixers.{cls.name}.dt_limit_low = {low}: must not be above dt_limit_high = {high}, or every "
                "step size would be the same"
            )

    @property
    def dt_limits(self) -> tuple[float, float]:
        """The least and the largest step size."""
        high = self.config.dt_limit_high
        return self.config.dt_limit_low, high if high > 0 else math.inf

    def layer_options(self) -> dict[str, Any]:
        states = self.init_states if self.config.learnable_init_states else None
        return {"initial_states": states, "recompute": self.recompute}

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        projected = self.in_proj(x)
        if not self.recompute or not torch.is_grad_enabled() or transformed():
            return self.mix_projected(projected, cu_seqlens)
        # Nothing in it is random, and reading a generator's state would keep CUDA graphs from being captured.
        return checkpoint(
            self.mix_projected,
            projected,
            cu_seqlens,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=keep_scan_output,
        )


def save_scan_only(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The rule of selective activation checkpointing: keeps the output of the scan, which costs most to compute again,
    and recomputes the rest."""
    # By name: an exported model that runs without the package has no such ops and computes the scan again too.
    kept = str(op) in ("matmix.conv_and_scan.default", "matmix.quasiseparable_scan.default")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_scan_output() -> Any:
    """Creates the contexts of a checkpoint that recomputes everything except the scan."""
    return create_selective_checkpoint_contexts(save_scan_only)
