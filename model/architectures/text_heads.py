"""The last layers of classifiers: what makes features and logits of the residual stream."""

from typing import Any

import torch
from torch import Tensor, nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.calls import weights_of
from matmix.model.config import ModelConfig
from matmix.model.positions import first_of_documents, mean_of_documents


class ClassifierHead(nn.Module):
    """dense -> tanh -> dropout, or dropout alone (`hidden = false`), and the last linear layer `output`, which the
    caller applies."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.head.hidden:
            self.dense = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.head.dropout)
        self.output = nn.Linear(config.d_model, config.head.count)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_model) -> what `output` is applied to, of the same shape."""
        if hasattr(self, "dense"):
            x = torch.tanh(self.dense(x))
        return self.dropout(x)


class WithClassifier:
    """Stands before an architecture: its features pass a `ClassifierHead`, whose output is the model's."""

    takes_head = True
    new_parameters = head_parameters = ("classifier.",)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.classifier = ClassifierHead(config)

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return 2.0 * config.d_model * (config.head.count + config.head.hidden * config.d_model)

    def features(self, x: Tensor) -> Tensor:
        return self.classifier(super().features(x))

    def output_layer(self) -> nn.Module:
        return self.classifier.output

    def output_projection(self) -> tuple[Tensor | None, Tensor | None]:
        return weights_of(self.classifier.output, "weight", "bias")


# -- one vector for every text ---------------------------------------------------------------------------------------


@register_architecture("text_embedder")
class TextEmbedder(EncoderTrunk):
    """An encoder that gives the features of the first position of every document, or their mean over all its positions
    (model.head.pooling), (ndocs, d_model); without new layers."""

    per_document = takes_head = True

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return 0.0

    def pool(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The pooled features after the final norm."""
        if self.config.head.pooling == "cls":
            return self.norm(first_of_documents(x, lengths))
        return mean_of_documents(self.norm(x), lengths)

    def features(self, x: Tensor) -> Tensor:
        return x


# -- classes or values of whole texts and pairs of texts -------------------------------------------------------------


@register_architecture("sequence_classifier")
class SequenceClassifier(WithClassifier, TextEmbedder):
    """An encoder with model.head.outputs logits or values for every document, (ndocs, outputs). For multiple choice,
    each choice is a document with one output."""


# -- classes of single tokens, such as parts of speech and names -----------------------------------------------------


@register_architecture("token_classifier")
class TokenClassifier(WithClassifier, EncoderTrunk):
    """An encoder with model.head.outputs logits for every position, (B, L, outputs)."""


# -- answers that are a part of the text: where they start and where they end ----------------------------------------


@register_architecture("span_classifier")
class SpanClassifier(TokenClassifier):
    """An encoder with two logits for every position, (B, L, 2): that the answer starts there, that it ends there."""

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.head.count != 2:
            raise ValueError(f"model.head.outputs = {config.head.outputs}: a span_classifier has 2, start and end")
