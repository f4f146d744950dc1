"""Encoders for transformers: AutoModel, AutoModelForMaskedLM and AutoModelForSequenceClassification."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput

from matmix.model.architectures.encoder import Encoder
from matmix.model.config import ModelConfig
from matmix.model.interop.export.base import MatmixPreTrainedModel, mean_cross_entropy, refuse_input_embeddings
from matmix.model.interop.export.config import MatmixEncoderConfig


class EncoderTrunk(Encoder):
    """An encoder without its masked-LM head: its features are the residual stream after the final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        del self.head
        if not config.tie_embeddings:
            del self.output

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def output_projection(self) -> tuple[torch.Tensor, None]:
        return self.embeddings.word.weight, None


class MatmixEncoderBase(MatmixPreTrainedModel):
    """An `Encoder`, or its trunk, in `self.model`."""

    config_class = MatmixEncoderConfig
    encoder_class: type[Encoder] = EncoderTrunk
    # The head of a masked language model in the file is of no use to models that have a trunk only.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = [r"^model\.(head|output)\."]

    def __init__(self, config: MatmixEncoderConfig):
        super().__init__(config)
        self.model = self.encoder_class(self.matmix_config())
        self.add_head()
        self.post_init()

    def add_head(self) -> None:
        """Creates the layers on top of `self.model`."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings.word

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embeddings.word = value

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Features (B, L, d_model); at padding they carry no information."""
        features = self.model(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            readout=lambda x, weight, bias: x,
        )
        return features.unflatten(0, input_ids.shape)


class MatmixEncoderModel(MatmixEncoderBase):
    """The residual stream after the last layer, (B, L, d_model)."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple:
        refuse_input_embeddings(inputs_embeds)
        output = BaseModelOutput(last_hidden_state=self.hidden_states(input_ids, attention_mask, token_type_ids))
        return output.to_tuple() if return_dict is False else output


class MatmixForMaskedLM(MatmixEncoderBase):
    """Logits for every token, to fill in <mask>."""

    encoder_class = Encoder
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = None

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

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple:
        """Logits (B, L, vocab_size); labels (B, L) hold the token to find, -100 where there is none."""
        refuse_input_embeddings(inputs_embeds)
        logits = self.model(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        loss = None if labels is None else mean_cross_entropy(logits, labels)
        output = MaskedLMOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


class MatmixForSequenceClassification(MatmixEncoderBase):
    """A linear classifier (or regressor) on the mean of the tokens' features."""

    def add_head(self) -> None:
        self.dropout = nn.Dropout(self.config.classifier_dropout)
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Logits (B, num_labels). labels: (B,) classes, (B,) values if num_labels is 1, (B, num_labels)
        0/1."""
        refuse_input_embeddings(inputs_embeds)
        hidden = self.hidden_states(input_ids, attention_mask, token_type_ids)
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = weight.to(hidden.dtype).unsqueeze(-1)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        logits = self.classifier(self.dropout(pooled))
        loss = None if labels is None else self.classification_loss(logits.float(), labels)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def classification_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """By config.problem_type, or by the number of labels and their type where that is not set."""
        kind = self.config.problem_type
        if kind is None and self.config.num_labels == 1:
            kind = "regression"
        if kind is None:
            kind = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        if kind == "regression":
            return F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype).view_as(logits.squeeze(-1)))
        if kind == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return F.cross_entropy(logits, labels.long().flatten())
