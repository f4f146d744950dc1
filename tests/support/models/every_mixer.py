"""One model of each architecture with every registered mixer that it can hold, one a layer, and a layer of nothing."""

from __future__ import annotations

from mixer_cases import small_config

from matmix.model import MixerOptions, ModelConfig
from matmix.model.config import NO_MIXER
from matmix.model.mixers import MIXERS

SEQLEN = 12


def encoder_of_all() -> ModelConfig:
    """Every bidirectional mixer."""
    return _model("encoder", [name for name, mixer in MIXERS.items() if mixer.bidirectional_form])


def language_model_of_all() -> ModelConfig:
    """Every causal mixer."""
    return _model("language_model", [name for name, mixer in MIXERS.items() if mixer.causal_form])


def _model(architecture: str, layers: list[str]) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        layers=(*layers, NO_MIXER),
        n_layers=len(layers) + 1,
        mixers=MixerOptions(**{name: small_config(name) for name in layers}),
        d_model=16,
        vocab_size=29,
        mlp_ratio=0,
        max_seqlen=SEQLEN,
    )
