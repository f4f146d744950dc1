"""How much arithmetic a token costs."""

from __future__ import annotations

from matmix.model.config import ModelConfig
from matmix.model.mixers import MIXERS


def flops_per_token(config: ModelConfig, seqlen: int, *, head_share: float = 1.0) -> float:
    """Floating-point operations (2 per multiply-add) of one forward pass, per token of a document of `seqlen`
    tokens.

    A training step costs about three times as much. Embedding look-ups, norms and activations are left out.
    head_share: share of the tokens that reach the output (masked LM: the masking probability).
    """
    total = 0.0
    for mixer, has_mlp in config.layer_kinds():
        if mixer is not None:
            total += MIXERS[mixer].flops_per_token(config.d_model, config.mixer_config(mixer), seqlen, config.causal)
        if has_mlp:
            total += 2.0 * 2 * config.d_model * round(config.d_model * config.mlp_ratio)
    head = config.vocab_size * config.d_model
    if config.architecture == "encoder":
        head += config.d_model**2
    return total + 2.0 * head * head_share
