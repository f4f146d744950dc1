"""Image classifiers for transformers: AutoModel and AutoModelForImageClassification."""

from __future__ import annotations

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from matmix.model.architectures.image_classifier import ImageClassifier
from matmix.model.interop.export.base import MatmixPreTrainedModel, classification_loss
from matmix.model.interop.export.config import MatmixImageConfig


class MatmixImageBase(MatmixPreTrainedModel):
    """An image classifier in `self.model`, with as many classes as config.num_labels says."""

    config_class = MatmixImageConfig
    main_input_name = "pixel_values"

    def __init__(self, config: MatmixImageConfig):
        config.matmix = {**config.matmix, "head": {**config.matmix.get("head", {}), "outputs": config.num_labels}}
        super().__init__(config)
        self.model = ImageClassifier(self.matmix_config())
        self.post_init()


class MatmixImageModel(MatmixImageBase):
    """The residual stream after the last layer, and one vector for each image."""

    def forward(
        self,
        pixel_values: torch.Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple:
        """last_hidden_state (B, L, d_model), pooler_output (B, d_model) and hidden states of pixel_values
        (B, channels, H, W)."""
        streams = self.streams(output_hidden_states, output_attentions)
        x = self.model.stream(pixel_values, streams)
        output = BaseModelOutputWithPooling(
            last_hidden_state=self.model.norm(x),
            pooler_output=self.model.pooled(x),
            hidden_states=self.hidden_states(streams),
        )
        return output.to_tuple() if return_dict is False else output


class MatmixForImageClassification(MatmixImageBase):
    """Logits of the classes of images."""

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> ImageClassifierOutput | tuple:
        """Logits (B, num_labels) of pixel_values (B, channels, H, W); labels as for `classification_loss`, by
        config.problem_type."""
        logits, hidden = self.run(pixel_values, self.streams(output_hidden_states, output_attentions))
        loss = None if labels is None else classification_loss(logits, labels, self.config.problem_type)
        output = ImageClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)
        return output.to_tuple() if return_dict is False else output
