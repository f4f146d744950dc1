"""Positions of patches in a picture, for pictures of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def resized_positions(positions: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Learned positions (side * side, C) of a square grid -> (rows * columns, C): interpolated (bicubic), or as they
    are where the grids are the same."""
    side = round(positions.shape[0] ** 0.5)
    if (rows, columns) == (side, side):
        return positions
    grid = positions.float().T.unflatten(1, (side, side)).unsqueeze(0)
    grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False, antialias=True)
    return grid[0].flatten(1).T.to(positions.dtype)


def sincos_positions(rows: int, columns: int, side: int, width: int, device: torch.device) -> torch.Tensor:
    """Sines and cosines of rows and columns, (rows * columns, width) float32, width a multiple of 4: a quarter each of
    sines and cosines of the row, and of the column.

    side: patches along one side of the images in training; other grids are stretched to the same range of numbers.
    """
    frequencies = 10000.0 ** (-torch.arange(width // 4, device=device, dtype=torch.float32) / (width // 4))

    def along(count: int) -> torch.Tensor:
        places = (torch.arange(count, device=device, dtype=torch.float32) + 0.5) * (side / count) - 0.5
        angles = places.unsqueeze(1) * frequencies
        return torch.cat((angles.sin(), angles.cos()), 1)

    down, across = along(rows), along(columns)
    both = (down.unsqueeze(1).expand(-1, columns, -1), across.unsqueeze(0).expand(rows, -1, -1))
    return torch.cat(both, 2).flatten(0, 1)
