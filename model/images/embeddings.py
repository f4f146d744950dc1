"""From images to the residual stream: patches, positions and the class token."""

from __future__ import annotations

import torch
from torch import nn

from matmix.model.images.config import ImageConfig
from matmix.model.images.patches import make_patches, patch_grid
from matmix.model.images.positions import resized_positions, sincos_positions
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule


class ImageEmbeddings(nn.Module):
    """Patches + positions, and the class token among them, then dropout: (B, C, H, W) -> (B, L, d_model).

    Patches stand row by row. The class token has no position: its own vector says where it is.
    """

    def __init__(self, image: ImageConfig, d_model: int, dropout: float):
        super().__init__()
        self.image = image
        self.patches = make_patches(image, d_model)
        if image.positions == "learned":
            self.positions = nn.Parameter(torch.empty(image.side**2, d_model))
        if image.class_token != "none":
            self.class_token = nn.Parameter(torch.empty(d_model))
        self.dropout = nn.Dropout(dropout)

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        return {"positions": NOT_DECAYED} if self.image.positions == "learned" else {}

    def forward(
        self, images: torch.Tensor, masked: torch.Tensor | None = None, token: torch.Tensor | None = None
    ) -> torch.Tensor:
        """masked: bool (B, rows, columns), patches that `token` (d_model,) stands for; no pixel of theirs is read, also
        by the convolutions of other patches."""
        rows, columns = patch_grid(images, self.image)
        if masked is not None:
            hidden = masked.repeat_interleave(self.image.patch, 1).repeat_interleave(self.image.patch, 2)
            images = images.masked_fill(hidden.unsqueeze(1), 0.0)
        x = self.patches(images)
        if masked is not None:
            x = torch.where(masked.flatten(1).unsqueeze(2), token.to(x.dtype), x)
        if self.image.positions == "learned":
            x = x + resized_positions(self.positions, rows, columns).to(x.dtype)
        elif self.image.positions == "sincos":
            x = x + sincos_positions(rows, columns, self.image.side, x.shape[2], x.device).to(x.dtype)
        if self.image.class_token != "none":
            place = self.image.class_place(x.shape[1])
            token = self.class_token.to(x.dtype).expand(x.shape[0], 1, -1)
            x = torch.cat((x[:, :place], token, x[:, place:]), 1)
        return self.dropout(x)
