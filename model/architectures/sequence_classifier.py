"""Classes or values of whole texts and pairs of texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.classifier_head import ClassifierHead, classifier_flops
from matmix.model.architectures.text_embedder import TextEmbedder
from matmix.model.calls import weights_of
from matmix.model.config import ModelConfig


@register_architecture("sequence_classifier")
class SequenceClassifier(TextEmbedder):
    """An encoder with model.head.outputs logits or values for every document, (ndocs, outputs). For multiple choice,
    each choice is a document with one output."""

    new_parameters = head_parameters = ("classifier.",)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.classifier = ClassifierHead(config)

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return classifier_flops(config)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x)

    def output_layer(self) -> nn.Module:
        return self.classifier.output

    def output_projection(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return weights_of(self.classifier.output, "weight", "bias")
