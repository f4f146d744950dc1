"""Bidirectional encoders with a masked-LM head, in the shape of BERT and of the published Hydra."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.encoder_trunk import EncoderTrunk
from matmix.model.blocks import activate
from matmix.model.calls import matrix_of, weight_of
from matmix.model.config import ModelConfig


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
class Encoder(EncoderTrunk):
    """Embeddings -> blocks -> final norm (pre-norm models) -> masked-LM head -> logits by the tied or a
    separate matrix."""

    head_parameters = ("head.", "output.")
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

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))

    def output_projection(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight = matrix_of(self.embeddings.word) if self.config.tie_embeddings else weight_of(self.output)
        return weight, weight_of(self.head, "bias")
