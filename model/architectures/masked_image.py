"""Images of which some patches are hidden: the model says what their pixels are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.image_trunk import ImageTrunk
from matmix.model.calls import weights_of
from matmix.model.config import ModelConfig
from matmix.model.images.patches import patch_grid


@register_architecture("masked_image")
class MaskedImage(ImageTrunk):
    """Patches, a learned vector in the place of hidden ones -> blocks -> final norm (pre-norm models) -> the pixels of
    each patch by one matrix, (B, patches, channels patch patch) in the order of `cut_patches` (arXiv 2111.09886)."""

    head_parameters = ("decoder.", "mask_token")

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.mask_token = nn.Parameter(torch.empty(config.d_model))
        self.decoder = nn.Linear(config.d_model, config.image.channels * config.image.patch**2)

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return 2.0 * config.d_model * config.image.channels * config.image.patch**2

    def embed(
        self, inputs: torch.Tensor, cu_seqlens: torch.Tensor | None = None, masked: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.embeddings(inputs, masked, self.mask_token)

    def forward(
        self,
        inputs: torch.Tensor,
        *,
        masked: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        select: torch.Tensor | None = None,
        readout: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], Any] | None = None,
        streams: list[torch.Tensor] | None = None,
    ) -> Any:
        """The pixels of all patches of images (B, channels, H, W), or whatever `readout` makes of the features.

        masked: bool (B, rows, columns) of squares that are hidden, each of one patch, or of any number of patches in
        height and width; None = none. select: as in `Backbone.forward`, of the flattened B * patches. Of the other
        arguments images have no use: max_seqlen is left aside.
        """
        if cu_seqlens is not None or attention_mask is not None:
            raise ValueError("a masked_image model reads whole images: give it no cu_seqlens and no attention_mask")
        if masked is not None:
            masked = self._of_patches(masked, inputs)
        x = self.stream(inputs, streams, **({} if masked is None else {"masked": masked}))
        image = self.config.image
        if image.class_token != "none":
            place = image.class_place(x.shape[1] - 1)
            x = torch.cat((x[:, :place], x[:, place + 1 :]), 1)
        if select is not None:
            x = x.flatten(0, 1)[select]
        x = self.features(x)
        return self.project(x) if readout is None else readout(x, *self.output_projection())

    def _of_patches(self, masked: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """bool (B, rows, columns) of patches. Raises ValueError (one line) where the squares are no whole patches."""
        grid = patch_grid(images, self.config.image)
        for dim, count in enumerate(grid, start=1):
            if count % masked.shape[dim]:
                raise ValueError(
                    f"{masked.shape[1]} x {masked.shape[2]} squares that are hidden are no whole patches of the "
                    f"{grid[0]} x {grid[1]}: let a square be as large as a patch, or a multiple of it"
                )
            masked = masked.repeat_interleave(count // masked.shape[dim], dim)
        return masked

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def output_layer(self) -> nn.Module:
        return self.decoder

    def output_projection(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return weights_of(self.decoder, "weight", "bias")
