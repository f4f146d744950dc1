"""Causal language models: next-token logits, and generation with carried state."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from matmix.model.architecture import register_architecture
from matmix.model.backbone import Backbone, embedding_norm, final_norm
from matmix.model.calls import matrix_of, weight_of
from matmix.model.config import ModelConfig


@register_architecture("language_model")
class LanguageModel(Backbone):
    """Word embeddings -> blocks -> final norm (pre-norm models) -> logits by the tied or a separate matrix."""

    causal = True
    readout_norm = "norm"
    growing_parameters = MappingProxyType({"embedding.weight": "vocab_size", "output.weight": "vocab_size"})

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = embedding_norm(config)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.norm = final_norm(config)
        if not config.tie_embeddings:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def embed(self, inputs: Tensor, cu_seqlens: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        if token_type_ids is not None:
            raise ValueError("a language_model has no token types; leave token_type_ids out")
        x = inputs if inputs.is_floating_point() else self.embedding(inputs)
        return self.embedding_dropout(self.embedding_norm(x))

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def output_layer(self) -> nn.Module | None:
        return None if self.config.tie_embeddings else self.output

    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        return matrix_of(self.embedding) if self.config.tie_embeddings else weight_of(self.output), None

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> list[Any]:
        """One state per layer (None without a mixer) before the first token. device: None = where the weights are."""
        return [block.initial_state(batch_size, device) for block in self.blocks]

    def step(self, token_ids: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        """Next-token logits (B, vocab_size) and new state after one more token each, token_ids (B,)."""
        x, new_state = self.carry(self.embed(token_ids), state, "step")
        return self.project(self.features(x)), new_state

    def step_in_place(self, token_ids: Tensor, state: list[Any]) -> Tensor:
        """`step` whose new state takes the memory of the given one; states that overflow are not refused."""
        x = self.embed(token_ids)
        for block, block_state in zip(self.blocks, state, strict=True):
            x = block(x, block_state, method="step_in_place")
        return self.project(self.features(x))

    def prefill(self, input_ids: Tensor, state: list[Any] | None = None) -> tuple[Tensor, list[Any]]:
        """Logits (B, vocab_size) after the last of input_ids (B, L), L >= 1, and the state there, in parallel."""
        if input_ids.shape[1] == 0:
            raise ValueError("prefill needs at least one token")
        state = self.initial_state(input_ids.shape[0], input_ids.device) if state is None else state
        return self.read(input_ids, state, lambda x: x[:, -1])

    def read(
        self, inputs: Tensor, state: list[Any], take: Callable[[Tensor], Tensor], streams: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Logits (..., vocab_size) of what `take` takes (..., d_model) of the stream (B, L, d_model) behind the last
        block, and the new state, in parallel form.

        Args: inputs (B, L), L >= 1, token ids, or embeddings (B, L, d_model); streams: as of `Backbone.forward`.
        """
        x, new_state = self.carry(self.embed(inputs), state, "forward_with_state", streams)
        return self.project(self.features(take(x))), new_state

    def carry(
        self, x: Tensor, state: list[Any], method: str, streams: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Any]]:
        """The residual stream x behind the last block, and the new state, by a method of all blocks."""
        new_state = []
        for block, block_state in zip(self.blocks, state, strict=True):
            if streams is not None:
                streams.append(x)
            x, block_state = block(x, block_state, method=method)
            new_state.append(block_state)
        if streams is not None:
            streams.append(x)
        return x, new_state
