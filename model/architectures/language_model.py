"""Causal language models: next-token logits, and generation with carried state."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from matmix.model.architecture import register_architecture
from matmix.model.backbone import Backbone, final_norm
from matmix.model.config import ModelConfig


@register_architecture("language_model")
class LanguageModel(Backbone):
    """Word embeddings -> blocks -> final norm (pre-norm models) -> logits by the tied or a separate
    matrix."""

    causal = True
    growing_parameters = MappingProxyType({"embedding.weight": "vocab_size", "output.weight": "vocab_size"})

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.norm = final_norm(config)
        if not config.tie_embeddings:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def embed(
        self,
        inputs: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if token_type_ids is not None:
            raise ValueError("a language_model has no token types; leave token_type_ids out")
        return self.embedding_dropout(inputs if inputs.is_floating_point() else self.embedding(inputs))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def output_projection(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (self.embedding if self.config.tie_embeddings else self.output).weight, None

    def initial_state(self, batch_size: int) -> list[Any]:
        """The state before the first token: one entry per layer (None for layers without a mixer)."""
        return [block.initial_state(batch_size) for block in self.blocks]

    def step(self, token_ids: torch.Tensor, state: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        """Next-token logits (B, vocab_size) and new state after one more token each, token_ids (B,)."""
        x, new_state = self.embed(token_ids), []
        for block, block_state in zip(self.blocks, state, strict=True):
            x, block_state = block.step(x, block_state)
            new_state.append(block_state)
        weight, bias = self.output_projection()
        return F.linear(self.features(x), weight, bias), new_state

    def step_in_place(self, token_ids: torch.Tensor, state: list[Any]) -> torch.Tensor:
        """`step` whose new state takes the memory of the given one; states that overflow are not refused."""
        x = self.embed(token_ids)
        for block, block_state in zip(self.blocks, state, strict=True):
            x = block.step_in_place(x, block_state)
        weight, bias = self.output_projection()
        return F.linear(self.features(x), weight, bias)

    def prefill(self, input_ids: torch.Tensor, state: list[Any] | None = None) -> tuple[torch.Tensor, list[Any]]:
        """Logits (B, vocab_size) after the last of input_ids (B, L), L >= 1, and the state there, in parallel
        form."""
        if input_ids.shape[1] == 0:
            raise ValueError("prefill needs at least one token")
        state = self.initial_state(input_ids.shape[0]) if state is None else state
        x, new_state = self.embed(input_ids), []
        for block, block_state in zip(self.blocks, state, strict=True):
            x, block_state = block.forward_with_state(x, block_state)
            new_state.append(block_state)
        weight, bias = self.output_projection()
        return F.linear(self.features(x[:, -1]), weight, bias), new_state
