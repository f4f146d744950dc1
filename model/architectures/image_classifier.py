"""Classes of images: patches in the place of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.classifier_head import ClassifierHead, classifier_flops
from matmix.model.architectures.image_trunk import ImageTrunk
from matmix.model.calls import weights_of
from matmix.model.config import ModelConfig


@register_architecture("image_classifier")
class ImageClassifier(ImageTrunk):
    """Patches -> blocks -> final norm (pre-norm models) -> mean over the patches, or class token -> logits of
    model.head.outputs classes, (B, outputs)."""

    per_document = takes_head = True
    new_parameters = head_parameters = ("classifier.",)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.classifier = ClassifierHead(config)

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        image = config.image
        mixers = config.mixer_names()
        sees = not mixers or any(not config.mixer_is_causal(name) for name in mixers)
        if image.pooling == "cls" and image.class_token == "first" and not sees:
            raise ValueError(
                'model.image.class_token = "first" comes before all patches, of which causal mixers show it none; '
                'set model.image.pooling = "mean"'
            )

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return classifier_flops(config)

    def forward(
        self,
        inputs: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        select: torch.Tensor | None = None,
        readout: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], Any] | None = None,
        streams: list[torch.Tensor] | None = None,
    ) -> Any:
        """Logits (B, outputs) of images (B, channels, H, W), or whatever `readout` makes of the features (B, d_model).

        H and W may be any multiples of the patch. streams: as in `Backbone.forward`, L positions as `ImageEmbeddings`
        has them. Of the other arguments images have no use: max_seqlen and select are left aside.
        """
        if cu_seqlens is not None or attention_mask is not None:
            raise ValueError("an image_classifier reads whole images: give it no cu_seqlens and no attention_mask")
        x = self.features(self.pooled(self.stream(inputs, streams)))
        return self.project(x) if readout is None else readout(x, *self.output_projection())

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        """The stream (B, L, d_model) after the final norm -> one vector for each image, (B, d_model). The mean is over
        the patches, without the class token."""
        image = self.config.image
        patches = x.shape[1] - image.class_tokens
        place = image.class_place(patches)
        if image.pooling == "cls":
            return self.norm(x[:, place])
        x = self.norm(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = wide.sum(1)
        if image.class_token != "none":
            total = total - wide[:, place]
        return (total / patches).to(x.dtype)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x)

    def output_layer(self) -> nn.Module:
        return self.classifier.output

    def output_projection(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return weights_of(self.classifier.output, "weight", "bias")
