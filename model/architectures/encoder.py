"""Bidirectional encoders with a masked-LM head, in the shape of BERT and of the published Hydra."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from matmix.model.architecture import register_architecture
from matmix.model.backbone import Backbone, final_norm
from matmix.model.blocks import activate
from matmix.model.config import ModelConfig
from matmix.model.positions import document_positions


class EncoderEmbeddings(nn.Module):
    """LayerNorm(word + token type + position), then dropout."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.d_model)
        if config.position_embeddings:
            self.position = nn.Embedding(config.max_seqlen, config.d_model)
        if config.type_vocab_size:
            self.token_type = nn.Embedding(config.type_vocab_size, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.embedding_norm_eps)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        x = self.word(input_ids)
        if hasattr(self, "token_type"):
            x = x + self.token_type(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        elif token_type_ids is not None:
            raise ValueError("this encoder has no token types (model.type_vocab_size = 0); leave token_type_ids out")
        if hasattr(self, "position"):
            x = x + self.position(document_positions(input_ids.shape[1], cu_seqlens, input_ids.device))
        return self.dropout(self.norm(x))


class MaskedLMHead(nn.Module):
    """LayerNorm(activation(dense(x))) and the bias of the output projection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = config.head_activation
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.head_norm_eps)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(activate(self.dense(x), self.activation))


@register_architecture("encoder")
class Encoder(Backbone):
    """Embeddings -> blocks -> final norm (pre-norm models) -> masked-LM head -> logits by the tied or a
    separate matrix."""

    causal = False

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embeddings = EncoderEmbeddings(config)
        self.norm = final_norm(config)
        self.head = MaskedLMHead(config)
        if not config.tie_embeddings:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)

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

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return super().output_flops(config) + 2.0 * config.d_model**2

    def embed(
        self,
        inputs: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.embeddings(inputs, token_type_ids, cu_seqlens)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))

    def output_projection(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (self.embeddings.word if self.config.tie_embeddings else self.output).weight, self.head.bias
