"""One vector for every text."""

from __future__ import annotations

from typing import Any

import torch

from matmix.model.architecture import register_architecture
from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.positions import first_of_documents, mean_of_documents


@register_architecture("text_embedder")
class TextEmbedder(EncoderTrunk):
    """An encoder that gives the features of the first position of every document, or their mean over all its positions
    (model.head.pooling), (ndocs, d_model); without new layers."""

    per_document = takes_head = True

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return 0.0

    def pool(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The pooled features after the final norm."""
        if self.config.head.pooling == "cls":
            return self.norm(first_of_documents(x, lengths))
        return mean_of_documents(self.norm(x), lengths)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x
