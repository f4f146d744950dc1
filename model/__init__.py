"""Language models and encoders whose layers mix the sequence with structured matrices."""

from matmix.model.build import build_model, count_parameters
from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.encoder import Encoder
from matmix.model.flops import flops_per_token
from matmix.model.initialization import initialize
from matmix.model.language_model import LanguageModel

__all__ = [
    "Encoder",
    "LanguageModel",
    "MixerOptions",
    "ModelConfig",
    "build_model",
    "count_parameters",
    "flops_per_token",
    "initialize",
]
