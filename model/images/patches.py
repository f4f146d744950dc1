"""From images to one vector for each patch."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.images.config import ImageConfig
from matmix.model.initialization import constant_init, normal_init
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule


def patch_grid(images: Tensor, image: ImageConfig) -> tuple[int, int]:
    """Rows and columns of patches of images (B, C, H, W). Raises ValueError (one line) for other shapes and sizes."""
    if images.dim() != 4 or images.shape[1] != image.channels:
        raise ValueError(
            f"images have shape {tuple(images.shape)}; the model reads (batch, {image.channels}, height, width)"
        )
    height, width = images.shape[2:]
    if height % image.patch or width % image.patch or not height or not width:
        raise ValueError(
            f"images of {height} x {width} pixels do not divide into patches of {image.patch} x {image.patch}; "
            "resize or crop them to multiples of it"
        )
    return height // image.patch, width // image.patch


def cut_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, C, H, W) -> the pixels of each patch, (B, rows * columns, C patch patch), row by row."""
    batch, channels, height, width = images.shape
    cut = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class LinearPatches(nn.Linear):
    """Each patch through one matrix: (B, C, H, W) -> (B, rows * columns, d_model), row by row.

    The weight (d_model, C patch patch) is that of a convolution of stride `patch`, flattened.
    """

    def __init__(self, image: ImageConfig, d_model: int):
        super().__init__(image.channels * image.patch**2, d_model)
        self.patch = image.patch
        # As timm's: patches of any size become vectors of one size (0.02 for 3 channels of 16 x 16), so that small ones
        # are not lost beside the positions.
        self.init_rules = {"weight": normal_init(1 / math.sqrt(3 * self.in_features))}

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(cut_patches(images, self.patch))

    def flops(self) -> float:
        """Forward floating-point operations for one patch."""
        return 2.0 * self.in_features * self.out_features


class ConvStem(nn.Module):
    """Convolutions of width 3 and stride 2, each with a norm over the image and GELU, that halve an image until a patch
    is one position; then one matrix: (B, C, H, W) -> (B, rows * columns, d_model), row by row.

    Widths double from layer to layer; the last is d_model / 2 (at least 8).
    """

    def __init__(self, image: ImageConfig, d_model: int):
        super().__init__()
        count = int(math.log2(image.patch))
        widths = [image.channels, *(max(d_model >> (count - index), 8) for index in range(count))]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False) for before, after in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for width in widths[1:])
        self.out = nn.Linear(widths[-1], d_model)
        self.init_rules = {f"norms.{index}.weight": constant_init(1.0) for index in range(count)}
        for index, width in enumerate(widths[:-1]):
            self.init_rules[f"convs.{index}.weight"] = normal_init(math.sqrt(2 / (9 * width)))

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.functional.gelu(norm(conv(x)))
        return self.out(x.flatten(2).transpose(1, 2))

    def flops(self) -> float:
        """Forward floating-point operations for one patch."""
        total = 2.0 * self.out.in_features * self.out.out_features
        for index, conv in enumerate(reversed(self.convs)):
            total += 4**index * 2.0 * 9 * conv.in_channels * conv.out_channels
        return total


def make_patches(image: ImageConfig, d_model: int) -> LinearPatches | ConvStem:
    """The module that `image.stem` names."""
    return (ConvStem if image.stem == "conv" else LinearPatches)(image, d_model)


# -- positions of patches in a picture, for pictures of any size -----------------------------------------------------


def resized_positions(positions: Tensor, rows: int, columns: int) -> Tensor:
    """Learned positions (side * side, C) of a square grid -> (rows * columns, C), interpolated (bicubic)."""
    side = round(positions.shape[0] ** 0.5)
    if (rows, columns) == (side, side):
        return positions
    grid = positions.float().T.unflatten(1, (side, side)).unsqueeze(0)
    grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False, antialias=True)
    return grid[0].flatten(1).T.to(positions.dtype)


def sincos_positions(rows: int, columns: int, side: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines of rows and columns, (rows * columns, width) float32, width a multiple of 4: a quarter each of
    sines and cosines of the row, and of the column.

    side: patches along one side of the images in training; other grids are stretched to the same range of numbers.
    """
    frequencies = 10000.0 ** (-torch.arange(width // 4, device=device, dtype=torch.float32) / (width // 4))

    def along(count: int) -> Tensor:
        places = (torch.arange(count, device=device, dtype=torch.float32) + 0.5) * (side / count) - 0.5
        angles = places.unsqueeze(1) * frequencies
        return torch.cat((angles.sin(), angles.cos()), 1)

    down, across = along(rows), along(columns)
    both = (down.unsqueeze(1).expand(-1, columns, -1), across.unsqueeze(0).expand(rows, -1, -1))
    return torch.cat(both, 2).flatten(0, 1)


# -- from images to the residual stream: patches, positions and the class token --------------------------------------


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

    def forward(self, images: Tensor, masked: Tensor | None = None, token: Tensor | None = None) -> Tensor:
        """masked: bool (B, rows, columns), patches that `token` (d_model,) stands for, of which no pixel is read."""
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
