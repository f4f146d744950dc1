"""What the models of images share: patches, blocks, and a residual stream with one vector for each patch."""

from __future__ import annotations

from typing import Any

import torch

from matmix.model.backbone import Backbone, final_norm
from matmix.model.config import ModelConfig
from matmix.model.images.patches import ImageEmbeddings
from matmix.model.images.patches import make_patches, patch_grid
from matmix.model.images.patches import resized_positions
from matmix.model.images.scans import scan_count, scan_orders


class ImageTrunk(Backbone):
    """Patches -> blocks; `norm` is the final norm of pre-norm models. Subclasses make outputs of the stream."""

    causal = False
    tokens = False
    takes_images = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embeddings = ImageEmbeddings(config.image, config.d_model, config.embedding_dropout)
        self.norm = final_norm(config)

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.image.positions == "sincos" and config.d_model % 4:
            raise ValueError(
                f'model.d_model = {config.d_model}: model.image.positions = "sincos" needs a multiple of 4'
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
    def resized_parameter(cls, name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
        if name == "embeddings.positions":
            return resized_positions(value, config.image.side, config.image.side)
        return value

    def embed(self, inputs: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        return self.embeddings(inputs)

    def stream(
        self, images: torch.Tensor, streams: list[torch.Tensor] | None = None, **more: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream (B, L, d_model) behind the last block. streams: a list that the streams before the first
        block and after each are added to; masked: as of `ImageEmbeddings`."""
        rows, columns = patch_grid(images, self.config.image)
        orders = scan_orders(self.config.image, rows, columns, images.device)
        x = self.embed(images, **more)
        for block in self.blocks:
            if streams is not None:
                streams.append(x)
            x = block(x, None, None, orders)
        if streams is not None:
            streams.append(x)
        return x
