"""Answers that are a part of the text: where they start and where they end."""

from __future__ import annotations

from typing import Any

from matmix.model.architecture import register_architecture
from matmix.model.architectures.token_classifier import TokenClassifier


@register_architecture("span_classifier")
class SpanClassifier(TokenClassifier):
    """An encoder with two logits for every position, (B, L, 2): that the answer starts there, that it ends there."""

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.head.count != 2:
            raise ValueError(f"model.head.outputs = {config.head.outputs}: a span_classifier has 2, start and end")
