"""Encoders with other outputs for transformers: AutoModelForSequenceClassification, AutoModelForTokenClassification,
AutoModelForQuestionAnswering and AutoModelForMultipleChoice.

`self.model` is the architecture of that name, so that a model that was trained here is loaded as it is. A pretrained
encoder gets a new head, which transformers initialises. The configuration then says what the model has become, so that
what is saved can be read back here, too.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from matmix.model.architectures.sequence_classifier import SequenceClassifier
from matmix.model.architectures.span_classifier import SpanClassifier
from matmix.model.architectures.token_classifier import TokenClassifier
from matmix.model.interop.export.base import classification_loss, mean_cross_entropy, tokens_or_embeddings
from matmix.model.interop.export.config import MatmixEncoderConfig
from matmix.model.interop.export.encoder import MatmixEncoderBase


class MatmixEncoderWithHead(MatmixEncoderBase):
    """A classifier in `self.model`."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = [r"^model\.(head|output)\."]
    architecture: ClassVar[str]
    outputs: ClassVar[int | None] = None
    """Outputs of the head; None = config.num_labels."""

    def __init__(self, config: MatmixEncoderConfig):
        head = {
            "outputs": self.outputs or config.num_labels,
            "pooling": config.classifier_pooling,
            "hidden": config.classifier_hidden,
            "dropout": config.classifier_dropout,
        }
        config.matmix = {**config.matmix, "architecture": self.architecture, "head": head}
        super().__init__(config)


class MatmixForSequenceClassification(MatmixEncoderWithHead):
    """Classes or values of whole texts and pairs of texts."""

    encoder_class = SequenceClassifier
    architecture = "sequence_classifier"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Logits (B, num_labels); labels as for `classification_loss`, by config.problem_type."""
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        streams = self.streams(output_hidden_states, output_attentions)
        logits, hidden = self.run(inputs, streams, attention_mask=attention_mask, token_type_ids=token_type_ids)
        loss = None if labels is None else classification_loss(logits, labels, self.config.problem_type)
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)
        return output.to_tuple() if return_dict is False else output


class MatmixForTokenClassification(MatmixEncoderWithHead):
    """Classes of single tokens."""

    encoder_class = TokenClassifier
    architecture = "token_classifier"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> TokenClassifierOutput | tuple:
        """Logits (B, L, num_labels); labels (B, L) classes, -100 where there is none."""
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        streams = self.streams(output_hidden_states, output_attentions)
        logits, hidden = self.run(inputs, streams, attention_mask=attention_mask, token_type_ids=token_type_ids)
        loss = None if labels is None else mean_cross_entropy(logits, labels)
        output = TokenClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)
        return output.to_tuple() if return_dict is False else output


class MatmixForQuestionAnswering(MatmixEncoderWithHead):
    """Where in the text the answer starts and ends."""

    encoder_class = SpanClassifier
    architecture = "span_classifier"
    outputs = 2

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> QuestionAnsweringModelOutput | tuple:
        """start_logits and end_logits (B, L); start_positions and end_positions (B,) are tokens of the row. Behind its
        end they have no loss: the answer was cut off."""
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        streams = self.streams(output_hidden_states, output_attentions)
        logits, hidden = self.run(inputs, streams, attention_mask=attention_mask, token_type_ids=token_type_ids)
        start_logits, end_logits = (part.squeeze(-1).contiguous() for part in logits.split(1, dim=-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (span_loss(start_logits, start_positions) + span_loss(end_logits, end_positions)) / 2
        output = QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, hidden_states=hidden
        )
        return output.to_tuple() if return_dict is False else output


def span_loss(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits (B, L) against positions (B,), without those from L on."""
    positions = positions.long().clamp(min=0)
    return mean_cross_entropy(logits, positions.masked_fill(positions >= logits.shape[1], -100))


class MatmixForMultipleChoice(MatmixEncoderWithHead):
    """Which of several texts is the right one."""

    encoder_class = SequenceClassifier
    architecture = "sequence_classifier"
    outputs = 1

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MultipleChoiceModelOutput | tuple:
        """Logits (B, choices) of inputs (B, choices, L); labels (B,) say which choice is right."""
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        streams = self.streams(output_hidden_states, output_attentions)

        def rows(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.flatten(0, 1)

        more = {"attention_mask": rows(attention_mask), "token_type_ids": rows(token_type_ids)}
        logits, hidden = self.run(inputs.flatten(0, 1), streams, **more)
        logits = logits.view(inputs.shape[:2])
        loss = None if labels is None else mean_cross_entropy(logits, labels)
        output = MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=hidden)
        return output.to_tuple() if return_dict is False else output
