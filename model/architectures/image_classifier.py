"""Classes of images: patches in the place of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from matmix.model.architecture import register_architecture
from matmix.model.architectures.classifier_head import ClassifierHead, classifier_flops
from matmix.model.backbone import Backbone, final_norm
from matmix.model.config import ModelConfig
from matmix.model.images.embeddings import ImageEmbeddings
from matmix.model.images.patches import make_patches, patch_grid
from matmix.model.images.positions import resized_positions
from matmix.model.images.scans import scan_count, scan_orders


@register_architecture("image_classifier")
class ImageClassifier(Backbone):
    """Patches -> blocks -> final norm (pre-norm models) -> mean over the patches, or class token -> logits of
    model.head.outputs classes, (B, outputs)."""

    causal = False
    tokens = False
    per_document = takes_head = takes_images = True
    new_parameters = head_parameters = ("classifier.",)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embeddings = ImageEmbeddings(config.image, config.d_model, config.embedding_dropout)
        self.norm = final_norm(config)
        self.classifier = ClassifierHead(config)

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        image = config.image
        if image.positions == "sincos" and config.d_model % 4:
            raise ValueError(
                f'model.d_model = {config.d_model}: model.image.positions = "sincos" needs a multiple of 4'
            )
        mixers = config.mixer_names()
        sees = not mixers or any(not config.mixer_is_causal(name) for name in mixers)
        if image.pooling == "cls" and image.class_token == "first" and not sees:
            raise ValueError(
                'model.image.class_token = "first" comes before all patches, of which causal mixers show it none; '
                'set model.image.pooling = "mean"'
            )

    @classmethod
    def sequence_length(cls, config: Any, seqlen: int) -> int:
        return config.image.length

    @classmethod
    def scans(cls, config: Any) -> tuple[int, bool]:
        return scan_count(config.image), config.image.class_outside

    @classmethod
    def example_inputs(cls, config: Any, batch_size: int, seqlen: int) -> torch.Tensor:
        image = config.image
        return torch.zeros(batch_size, image.channels, image.size, image.size)

    @classmethod
    def input_flops(cls, config: Any) -> float:
        with torch.device("meta"):
            patches = make_patches(config.image, config.d_model)
        return patches.flops() * config.image.side**2 / config.image.length

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return classifier_flops(config)

    @classmethod
    def resized_parameter(cls, name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
        if name == "embeddings.positions":
            return resized_positions(value, config.image.side, config.image.side)
        return value

    def embed(self, inputs: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        return self.embeddings(inputs)

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
        weight, bias = self.output_projection()
        return F.linear(x, weight, bias) if readout is None else readout(x, weight, bias)

    def stream(self, images: torch.Tensor, streams: list[torch.Tensor] | None = None) -> torch.Tensor:
        """The residual stream (B, L, d_model) behind the last block; streams as for `forward`."""
        rows, columns = patch_grid(images, self.config.image)
        orders = scan_orders(self.config.image, rows, columns, images.device)
        x = self.embed(images)
        for block in self.blocks:
            if streams is not None:
                streams.append(x)
            x = block(x, None, None, orders)
        if streams is not None:
            streams.append(x)
        return x

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

    def output_projection(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.classifier.output.weight, self.classifier.output.bias
