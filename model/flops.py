"""Counts the floating-point operations of a model per token."""

from matmix.model.config import ModelConfig
from matmix.model.mixers import MIXERS
from matmix.model.mixers.structured.channels import CHANNEL_MAPS


def flops_per_token(config: ModelConfig, seqlen: int, *, head_share: float = 1.0) -> float:
    """Floating-point operations (2 per multiply-add) of one forward pass, per token of a document of `seqlen`
    tokens.

    A training step costs about three times as much. Embedding look-ups, norms and activations are left out.
    head_share: share of the tokens that reach the output (masked LM: the masking probability); models with one output
    for each document need none.
    """
    return sum(flops_by_part(config, seqlen, head_share=head_share).values())


def flops_per_image(config: ModelConfig) -> float:
    """Floating-point operations (2 per multiply-add) of one forward pass over one image of model.image.size. A training
    step costs about three times as much."""
    length = config.image.length
    return flops_per_token(config, length) * length


def flops_by_part(config: ModelConfig, seqlen: int, *, head_share: float = 1.0) -> dict[str, float]:
    """`flops_per_token` (of images: for one of their positions, whatever `seqlen` is) by what does the work: each kind
    of mixer over all its layers, "mlp", "embedding" where it computes, and "readout"."""
    seqlen = config.model_class.sequence_length(config, seqlen)
    strands = config.model_class.strands
    parts: dict[str, float] = {}
    for mixer, has_mlp in config.layer_kinds():
        if mixer is not None:
            options, causal = config.mixer_config(mixer), config.mixer_is_causal(mixer)
            scans, _ = config.model_class.scans(config)
            cost = MIXERS[mixer].flops_in_orders(config.d_model, options, seqlen, causal, scans)
            parts[mixer] = parts.get(mixer, 0.0) + cost * strands
        if has_mlp:
            parts["mlp"] = parts.get("mlp", 0.0) + 2.0 * _mlp_weights(config) * strands
    if embedding := config.model_class.input_flops(config):
        parts["embedding"] = embedding
    share = 1 / seqlen if config.model_class.per_document else head_share
    parts["readout"] = config.model_class.output_flops(config) * share
    return parts


def _mlp_weights(config: ModelConfig) -> int:
    """Returns the numbers in the matrices of one MLP."""
    narrow, wide = config.d_model, config.mlp_width
    if config.mlp == "dense":
        return (2 + config.mlp_gate) * narrow * wide
    kind, size = CHANNEL_MAPS[config.mlp], config.mlp_size
    return (1 + config.mlp_gate) * kind.weights(narrow, wide, size) + kind.weights(wide, narrow, size)
