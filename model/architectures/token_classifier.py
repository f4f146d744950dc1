"""Classes of single tokens, such as parts of speech and names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.classifier_head import ClassifierHead, classifier_flops
from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.calls import weights_of
from matmix.model.config import ModelConfig


@register_architecture("token_classifier")
class TokenClassifier(EncoderTrunk):
    """An encoder with model.head.outputs logits for every position, (B, L, outputs)."""

    takes_head = True
    new_parameters = head_parameters = ("classifier.",)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.classifier = ClassifierHead(config)

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return classifier_flops(config)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(super().features(x))

    def output_layer(self) -> nn.Module:
        return self.classifier.output

    def output_projection(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return weights_of(self.classifier.output, "weight", "bias")
