"""Models whose layers mix the sequence with structured matrices: language models, encoders, and those of your own."""

from matmix.model.architecture import ARCHITECTURES, register_architecture
from matmix.model.architectures.encoder import Encoder
from matmix.model.architectures.language_model import LanguageModel
from matmix.model.build import build_model, count_parameters
from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.flops import flops_per_token
from matmix.model.initialization import initialize

__all__ = [
    "ARCHITECTURES",
    "Encoder",
    "LanguageModel",
    "MixerOptions",
    "ModelConfig",
    "build_model",
    "count_parameters",
    "flops_per_token",
    "initialize",
    "register_architecture",
]
