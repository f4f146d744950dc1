"""What language model and encoder share: packing, padding, blocks, and the way to the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from matmix.model.blocks import Block
from matmix.model.config import ModelConfig
from matmix.model.positions import pad_back, unpad_indices


def final_norm(config: ModelConfig) -> nn.Module:
    """What the residual stream goes through before the output: a LayerNorm in pre-norm models that end with one."""
    if config.norm == "pre" and config.final_norm:
        return nn.LayerNorm(config.d_model, eps=config.final_norm_eps, bias=config.norm_bias)
    return nn.Identity()


class Backbone(nn.Module):
    """Embeddings -> blocks -> features -> logits. Subclasses give `embed`, `features` and
    `output_projection`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("model.vocab_size is not set: give it, or take it from the data")
        self.config = config
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))

    def embed(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        """Token ids (B, L) -> the residual stream (B, L, d_model)."""
        raise NotImplementedError

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream -> what the output projection is applied to, same shape."""
        raise NotImplementedError

    def output_projection(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight (vocab_size, d_model) and bias of the output projection."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        select: torch.Tensor | None = None,
        readout: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Any] | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> Any:
        """Logits, or whatever `readout` makes of the features.

        Args:
            input_ids: (B, L) int64.
            cu_seqlens: (ndocs + 1,) int32, document boundaries in the flattened batch of B * L tokens.
            attention_mask: (B, L), nonzero where a token is real. Padding is left out at the entry; where it
                was, the features are zero. Without padding it is as if it were not given. Not together with
                cu_seqlens.
            max_seqlen: length of the longest document, if known; saves finding it.
            select: (n,) int64 positions in the flattened batch; only their features go on to the output.
            readout: called as readout(features (n, d_model), weight (vocab_size, d_model), bias or None) in
                place of the output projection, inside this forward, where sharded weights are whole.
            token_type_ids: (B, L) int64, encoder only; zeros if not given.
        Returns: readout's value; else logits (n, vocab_size) with `select`, (B, L, vocab_size) without.
        """
        batch, length = input_ids.shape
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("give the model cu_seqlens or attention_mask, not both")
        indices = None
        if attention_mask is not None:
            real, boundaries, longest = unpad_indices(attention_mask)
            # Full rows stay rows, which mixers of a fixed length take too.
            if real.numel() < batch * length:
                indices, cu_seqlens, max_seqlen = real, boundaries, longest
        if cu_seqlens is not None:
            # From here on one row of documents, one after the other.
            input_ids = input_ids.flatten() if indices is None else input_ids.flatten()[indices]
            input_ids = input_ids.unsqueeze(0)
            if token_type_ids is not None:
                token_type_ids = token_type_ids.flatten() if indices is None else token_type_ids.flatten()[indices]
                token_type_ids = token_type_ids.unsqueeze(0)
        x = self.embed(input_ids, token_type_ids, cu_seqlens)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        x = x.flatten(0, 1)
        if indices is not None:
            x = pad_back(x, indices, batch * length)
        if select is not None:
            x = x[select]
        x = self.features(x)
        weight, bias = self.output_projection()
        if readout is not None:
            return readout(x, weight, bias)
        logits = F.linear(x, weight, bias)
        return logits if select is not None else logits.unflatten(0, (batch, length))

    def monitor(self) -> dict[str, torch.Tensor]:
        """Scalars of the last forward worth watching in training, such as the norms of MRU states, by
        layer."""
        return {
            f"blocks.{index}.{name}": value
            for index, block in enumerate(self.blocks)
            if block.mixer is not None
            for name, value in block.mixer.monitor().items()
        }
