"""Small models of every kind, and text in many scripts."""

from __future__ import annotations

import torch

from matmix.model import HeadConfig, ModelConfig, build_model, initialize
from matmix.model.architecture import Outputs
from matmix.model.config import MixerOptions
from matmix.model.mixers.attention.softmax_attention import AttentionConfig
from matmix.model.mixers.matrix_memory import MatrixMemoryConfig
from matmix.model.mixers.mru import MRUConfig
from matmix.model.mixers.scans.hydra import HydraConfig

MIXERS = MixerOptions(
    mru=MRUConfig(order=4),
    matrix_memory=MatrixMemoryConfig(products=2),
    hydra=HydraConfig(d_state=8, headdim=8),
    attention=AttentionConfig(headdim=8),
)

FIRST = MixerOptions(mru=MRUConfig(order=4, construction="identity_plus", input="chunked"))

PADDED = MixerOptions(mru=MRUConfig(order=2, nheads=8, construction="qr", decay=True))

MULTILINGUAL = (
    "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate.",
    "  spaces   and\ttabs \n\n\nand newlines\r\n ",
    "Größe, naïve café — “quotes” … ½ ﬁn",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते สวัสดี",
    "你好，世界。こんにちは 안녕하세요",
    "emoji 😀😃 👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷 end",
    "e\u0301 か\u3099 zero\u200bwidth\u00a0nbsp 0x41 <0x41> a < b > c",
)


SENTENCE = (
    "the quick brown fox jumps over the lazy dog while kings and queens sing songs of summer nights and "
    "winter days where rivers run to seas that no ship ever crossed before"
)


def training_text() -> list[str]:
    """A little English with some other scripts."""
    words = SENTENCE.split()
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 12)) for i in range(1, 200)]
    return lines + list(MULTILINGUAL) * 3


MODELS = {
    "mru": ModelConfig(vocab_size=448, d_model=32, n_layers=2, layers=("mru",), mixers=MIXERS),
    "without_mixers": ModelConfig(vocab_size=448, d_model=32, n_layers=2, layers=("none",), mlp_ratio=0.0),
    "mru_first": ModelConfig(vocab_size=448, d_model=32, n_layers=2, layers=("mru",), final_norm=False, mixers=FIRST),
    "mru_padded": ModelConfig(vocab_size=448, d_model=32, n_layers=2, layers=("mru",), mixers=PADDED),
    "mixed": ModelConfig(
        vocab_size=448,
        d_model=32,
        n_layers=3,
        layers=("mru", "matrix_memory", "attention"),
        mixers=MIXERS,
        tie_embeddings=False,
    ),
    "hydra": ModelConfig(
        architecture="encoder",
        init_std=0.02,
        vocab_size=448,
        d_model=32,
        n_layers=3,
        layers=("hydra", "hydra", "attention"),
        mixers=MIXERS,
        mlp_ratio=2.0,
    ),
    "hydra_post": ModelConfig(
        architecture="encoder",
        vocab_size=448,
        d_model=32,
        n_layers=2,
        layers=("hydra",),
        mlp_ratio=0.0,
        norm="post",
        norm_bias=True,
        position_embeddings=True,
        max_seqlen=64,
        mixers=MIXERS,
    ),
}


def with_head(architecture: str, **head) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=448,
        d_model=32,
        n_layers=2,
        layers=("hydra", "attention"),
        mixers=MIXERS,
        mlp_ratio=2.0,
        head=HeadConfig(**head),
    )


# What a fine-tuned run is, and what its outputs stand for.
HEADS = {
    "classes": (
        with_head("sequence_classifier", outputs=3),
        Outputs(labels=("bad", "fair", "good"), problem_type="single_label_classification"),
    ),
    "values": (
        with_head("sequence_classifier", outputs=1, pooling="mean", hidden=False),
        Outputs(problem_type="regression"),
    ),
    "choices": (with_head("sequence_classifier", outputs=1), Outputs(multiple_choice=True)),
    "tokens": (with_head("token_classifier", outputs=4, hidden=False), Outputs(labels=("O", "B-X", "I-X", "B-Y"))),
    "spans": (with_head("span_classifier", hidden=False), Outputs()),
    "embedder": (with_head("text_embedder", pooling="cls"), Outputs()),
}


def random_model(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """A model in which every parameter matters: nothing is left at 0 or 1."""
    model = build_model(config)
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()
