"""Encoders for transformers: AutoModel and AutoModelForMaskedLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import can_return_tuple

from matmix.model.architectures.encoder import Encoder
from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.interop.export.base import MatmixPreTrainedModel
from matmix.model.interop.export.config import MatmixEncoderConfig
from matmix.model.interop.export.losses import Count, class_loss


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
