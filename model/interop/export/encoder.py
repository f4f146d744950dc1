"""Encoders for transformers: AutoModel and AutoModelForMaskedLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from matmix.model.architectures.encoder import Encoder, EncoderTrunk
from matmix.model.architectures.text_heads import SequenceClassifier, SpanClassifier, TokenClassifier
from matmix.model.interop.export.base import MatmixPreTrainedModel
from matmix.model.interop.export.config import MatmixEncoderConfig
from matmix.model.interop.export.inputs import Count, class_loss, classification_loss, span_loss


class MatmixEncoderBase(MatmixPreTrainedModel):
    """An encoder, or the trunk of one, in `self.model`."""

    config_class = MatmixEncoderConfig
    encoder_class: type[EncoderTrunk] = EncoderTrunk
    # The output layers in the file are of no use to models that have a trunk only.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = [r"^model\.(head|output|classifier)\."]

    def __init__(self, config: MatmixEncoderConfig):
        super().__init__(config)
        self.model = self.encoder_class(self.matmix_config())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings.word

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embeddings.word = value


class MatmixEncoderModel(MatmixEncoderBase):
    """The residual stream after the last layer, (B, L, d_model)."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **keywords: Any,
    ) -> BaseModelOutput | tuple:
        """Features (B, L, d_model); at padding they carry no information."""
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        features, hidden = self.run_text(*texts, keywords, token_type_ids=token_type_ids)
        return BaseModelOutput(last_hidden_state=features, hidden_states=hidden)


class MatmixForMaskedLM(MatmixEncoderBase):
    """Logits for every token, to fill in <mask>."""

    encoder_class = Encoder
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = [r"^model\.classifier\."]

    def __init__(self, config: MatmixEncoderConfig):
        # A classifier's configuration is from here on that of an encoder.
        values = {name: value for name, value in config.matmix.items() if name != "head"}
        config.matmix = {**values, "architecture": "encoder"}
        super().__init__(config)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.embeddings.word if self.config.tie_word_embeddings else self.model.output

    def set_output_embeddings(self, value: nn.Module) -> None:
        if not self.config.tie_word_embeddings:
            self.model.output = value

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        missing = embeddings.weight.shape[0] - self.model.head.bias.shape[0]
        if missing:
            bias = self.model.head.bias.data
            bias = F.pad(bias, (0, missing)) if missing > 0 else bias[:missing].clone()
            self.model.head.bias = nn.Parameter(bias)
        return embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> MaskedLMOutput | tuple:
        """Logits (B, L, vocab_size); labels (B, L) hold the token to find, -100 where there is none."""
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        logits, hidden = self.run_text(*texts, keywords, token_type_ids=token_type_ids)
        loss = self.loss(class_loss, logits, labels, count=num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=hidden)


# -- encoder heads --------------------------------------------------------------------------------


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
    one_text_a_row = True

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> SequenceClassifierOutput | tuple:
        """Logits (B, num_labels); labels as for `classification_loss`, by config.problem_type."""
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        logits, hidden = self.run_text(*texts, keywords, token_type_ids=token_type_ids)
        problem = self.config.problem_type
        loss = self.loss(classification_loss, logits, labels, problem=problem, count=num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)


class MatmixForTokenClassification(MatmixEncoderWithHead):
    """Classes of single tokens."""

    encoder_class = TokenClassifier
    architecture = "token_classifier"

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> TokenClassifierOutput | tuple:
        """Logits (B, L, num_labels); labels (B, L) classes, -100 where there is none."""
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        logits, hidden = self.run_text(*texts, keywords, token_type_ids=token_type_ids)
        loss = self.loss(class_loss, logits, labels, count=num_items_in_batch)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)


class MatmixForQuestionAnswering(MatmixEncoderWithHead):
    """Where in the text the answer starts and ends."""

    encoder_class = SpanClassifier
    architecture = "span_classifier"
    one_text_a_row = True
    outputs = 2

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> QuestionAnsweringModelOutput | tuple:
        """start_logits and end_logits (B, L); start_positions and end_positions (B,) are tokens of the row. Behind its
        end they have no loss: the answer was cut off."""
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        logits, hidden = self.run_text(*texts, keywords, token_type_ids=token_type_ids)
        start_logits, end_logits = (part.squeeze(-1).contiguous() for part in logits.split(1, dim=-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            starts = span_loss(start_logits, start_positions, num_items_in_batch)
            loss = (starts + span_loss(end_logits, end_positions, num_items_in_batch)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, hidden_states=hidden
        )


class MatmixForMultipleChoice(MatmixEncoderWithHead):
    """Which of several texts is the right one."""

    encoder_class = SequenceClassifier
    architecture = "sequence_classifier"
    one_text_a_row = True
    outputs = 1

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> MultipleChoiceModelOutput | tuple:
        """Logits (B, choices) of inputs (B, choices, L); labels (B,) say which choice is right."""
        texts = [
            None if values is None else values.flatten(0, 1)
            for values in (input_ids, inputs_embeds, attention_mask, position_ids, token_type_ids)
        ]
        logits, hidden = self.run_text(*texts[:4], keywords, token_type_ids=texts[4])
        logits = logits.view((inputs_embeds if input_ids is None else input_ids).shape[:2])
        loss = self.loss(class_loss, logits, labels, count=num_items_in_batch)
        return MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=hidden)
