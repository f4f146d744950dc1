"""Models whose layers mix the sequence with structured matrices: language models, encoders, and those of your own."""

from matmix.model.architecture import ARCHITECTURES, register_architecture
from matmix.model.architectures.encoder import Encoder
from matmix.model.architectures.encoder_decoder import EncoderDecoder
from matmix.model.architectures.images import ImageClassifier, MaskedImage
from matmix.model.architectures.language_model import LanguageModel
from matmix.model.architectures.reverse_complement import StrandEncoder
from matmix.model.architectures.text_heads import SequenceClassifier, SpanClassifier, TextEmbedder, TokenClassifier
from matmix.model.build import build_model, count_parameters
from matmix.model.config import HeadConfig, MixerOptions, ModelConfig
from matmix.model.flops import flops_per_image, flops_per_token
from matmix.model.images.config import ImageConfig
from matmix.model.initialization import initialize

__all__ = [
    "ARCHITECTURES",
    "Encoder",
    "EncoderDecoder",
    "HeadConfig",
    "ImageClassifier",
    "ImageConfig",
    "LanguageModel",
    "MaskedImage",
    "MixerOptions",
    "ModelConfig",
    "SequenceClassifier",
    "SpanClassifier",
    "StrandEncoder",
    "TextEmbedder",
    "TokenClassifier",
    "build_model",
    "count_parameters",
    "flops_per_image",
    "flops_per_token",
    "initialize",
    "register_architecture",
]
