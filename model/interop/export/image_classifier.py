"""Image classifiers for transformers: AutoModel and AutoModelForImageClassification."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils import can_return_tuple

from matmix.model.architectures.image_classifier import ImageClassifier
from matmix.model.interop.export.base import MatmixPreTrainedModel
from matmix.model.interop.export.config import MatmixImageConfig
from matmix.model.interop.export.losses import Count, classification_loss


class MatmixImageBase(MatmixPreTrainedModel):
    """An image classifier in `self.model`, with as many classes as config.num_labels says."""

    config_class = MatmixImageConfig
    main_input_name = "pixel_values"

    def __init__(self, config: MatmixImageConfig):
        config.matmix = {**config.matmix, "head": {**config.matmix.get("head", {}), "outputs": config.num_labels}}
        super().__init__(config)
        self.model = ImageClassifier(self.matmix_config())
        self.post_init()

    def in_own_type(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The images in the type of the weights: processors give float32, whatever type the model is loaded in."""
        return pixel_values.to(self.dtype) if pixel_values.is_floating_point() else pixel_values


class MatmixImageModel(MatmixImageBase):
    """The residual stream after the last layer, and one vector for each image."""

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        **keywords: Any,
    ) -> BaseModelOutputWithPooling | tuple:
        """last_hidden_state (B, L, d_model), pooler_output (B, d_model) and hidden states of pixel_values
        (B, channels, H, W)."""
        streams = self.streams(keywords)
        x = self.model.stream(self.in_own_type(pixel_values), streams)
        return BaseModelOutputWithPooling(
            last_hidden_state=self.model.norm(x),
            pooler_output=self.model.pooled(x),
            hidden_states=self.hidden_states(streams),
        )


class MatmixForImageClassification(MatmixImageBase):
    """Logits of the classes of images."""

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> ImageClassifierOutput | tuple:
        """Logits (B, num_labels) of pixel_values (B, channels, H, W); labels as for `classification_loss`, by
        config.problem_type."""
        logits, hidden = self.run(self.in_own_type(pixel_values), keywords)
        problem = self.config.problem_type
        loss = self.loss(classification_loss, logits, labels, problem=problem, count=num_items_in_batch)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)
