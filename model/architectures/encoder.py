"""Bidirectional encoders with a masked-LM head, in the shape of BERT and of the published Hydra."""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from matmix.model.architecture import register_architecture
from matmix.model.backbone import Backbone, embedding_norm, final_norm
from matmix.model.blocks import activate
from matmix.model.calls import matrix_of, weight_of
from matmix.model.config import ModelConfig
from matmix.model.norms import make_norm
from matmix.model.positions import document_positions

# -- the body that all encoders share: embeddings, blocks that see both sides, and the final norm --------------------


class EncoderEmbeddings(nn.Module):
    """norm(word + token type + position), then dropout."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.d_model)
        if config.position_embeddings:
            self.position = nn.Embedding(config.max_seqlen, config.d_model)
        if config.type_vocab_size:
            self.token_type = nn.Embedding(config.type_vocab_size, config.d_model)
        own = config.embedding_norm == "auto"
        self.norm = nn.LayerNorm(config.d_model, config.embedding_norm_eps) if own else embedding_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, inputs: Tensor, token_type_ids: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Token ids (B, L) int64, or what `word` gives for them, (B, L, d_model)."""
        x = inputs if inputs.is_floating_point() else self.word(inputs)
        if hasattr(self, "token_type"):
            if token_type_ids is None:
                token_type_ids = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
            x = x + self.token_type(token_type_ids)
        elif token_type_ids is not None:
            raise ValueError("this encoder has no token types (model.type_vocab_size = 0); leave token_type_ids out")
        if hasattr(self, "position"):
            x = x + self.position(document_positions(inputs.shape[1], cu_seqlens, inputs.device))
        return self.dropout(self.norm(x))


class EncoderTrunk(Backbone):
    """Embeddings -> blocks -> final norm (pre-norm models): features (B, L, d_model) without an output layer."""

    causal = False
    growing_parameters = MappingProxyType(
        {
            "embeddings.word.weight": "vocab_size",
            "embeddings.position.weight": "max_seqlen",
            "embeddings.token_type.weight": "type_vocab_size",
        }
    )

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embeddings = EncoderEmbeddings(config)
        self.norm = final_norm(config)

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.type_vocab_size < 0:
            raise ValueError(f"model.type_vocab_size = {config.type_vocab_size}: must be 0 or more")

    @classmethod
    def check_seqlen(cls, config: Any, seqlen: int) -> None:
        if config.position_embeddings and seqlen > config.max_seqlen:
            raise ValueError(
                f"sequence length {seqlen} exceeds the {config.max_seqlen} position embeddings; raise model.max_seqlen"
            )

    def embed(self, inputs: Tensor, cu_seqlens: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        return self.embeddings(inputs, token_type_ids, cu_seqlens)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def output_projection(self) -> tuple[Tensor | None, Tensor | None]:
        return None, None


class MaskedLMHead(nn.Module):
    """norm(activation(dense(x))) and the bias of the output projection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = config.head_activation
        self.dense = nn.Linear(config.d_model, config.d_model, bias=config.head_bias)
        self.norm = make_norm(config, eps=config.head_norm_eps, bias=config.head_bias)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(activate(self.dense(x), self.activation))


@register_architecture("encoder")
class Encoder(EncoderTrunk):
    """Embeddings -> blocks -> final norm (pre-norm) -> masked-LM head -> logits by the tied or a separate matrix."""

    head_parameters = ("head.", "output.")
    readout_norm = "head.norm"
    growing_parameters = MappingProxyType(
        {**EncoderTrunk.growing_parameters, "head.bias": "vocab_size", "output.weight": "vocab_size"}
    )

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.head = MaskedLMHead(config)
        if not config.tie_embeddings:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return super().output_flops(config) + 2.0 * config.d_model**2

    def features(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def output_projection(self) -> tuple[Tensor | None, Tensor | None]:
        weight = matrix_of(self.embeddings.word) if self.config.tie_embeddings else weight_of(self.output)
        return weight, weight_of(self.head, "bias")
