"""The orders in which the patches of a picture are read.

All are permutations of the numbers that patches have row by row, computed on the device from arithmetic alone.
"""

import torch
from torch import Tensor

from matmix.model.images.config import ImageConfig
from matmix.model.mixers.base import ScanOrders


def row_snake(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Row by row, every second one from right to left: (rows * columns,) int64."""
    grid = torch.arange(rows * columns, device=device).view(rows, columns)
    backwards = torch.arange(rows, device=device).unsqueeze(1) % 2 == 1
    return torch.where(backwards, grid.flip(1), grid).flatten()


def column_order(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Column by column from top to bottom: (rows * columns,) int64."""
    return torch.arange(rows * columns, device=device).view(rows, columns).T.flatten()


def column_snake(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Column by column, every second one from bottom to top: (rows * columns,) int64."""
    grid = torch.arange(rows * columns, device=device).view(rows, columns)
    backwards = torch.arange(columns, device=device) % 2 == 1
    return torch.where(backwards, grid.flip(0), grid).T.flatten()


def hilbert_order(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Along the Hilbert curve of the smallest square of 2^n x 2^n that holds the grid, left out what lies outside of
    the grid: (rows * columns,) int64. Neighbours on it are neighbours in the picture, but for jumps past what was left
    out."""
    y = torch.arange(rows, device=device).unsqueeze(1).expand(rows, columns).flatten()
    x = torch.arange(columns, device=device).repeat(rows)
    distance = torch.zeros_like(x)
    half = 1 << (max(rows, columns) - 1).bit_length() >> 1
    while half:
        right, down = (x & half) > 0, (y & half) > 0
        distance = distance + half * half * ((3 * right.long()) ^ down.long())
        # Of the upper quarters the curve is turned: coordinates change places, in the right one from the far corner.
        low_x, low_y = x & (half - 1), y & (half - 1)
        mirrored = right & ~down
        turned_x = torch.where(mirrored, half - 1 - low_x, low_x)
        turned_y = torch.where(mirrored, half - 1 - low_y, low_y)
        x, y = torch.where(down, low_x, turned_y), torch.where(down, low_y, turned_x)
        half >>= 1
    return distance.argsort()


_SCANS = {
    "column": (column_order,),
    "both": (None, column_order),
    "snake": (row_snake, column_snake),
    "hilbert": (hilbert_order,),
}
"""`model.image.scan` -> its orders; None = row by row."""


def scan_count(image: ImageConfig) -> int:
    """The number of orders that are read and averaged."""
    return len(_SCANS.get(image.scan, (None,)))


def scan_orders(image: ImageConfig, rows: int, columns: int, device: torch.device | None = None) -> ScanOrders | None:
    """The orders of all positions of an image of rows x columns patches, the class token in its place or outside; None
    where they are read as they stand."""
    if image.scan == "row" and not image.class_outside:
        return None
    patches = rows * columns
    found = []
    for scan in _SCANS.get(image.scan, (None,)):
        order = torch.arange(patches, device=device) if scan is None else scan(rows, columns, device)
        if image.class_token != "none":
            place = image.class_place(patches)
            order = order + (order >= place)  # the class token's position is no patch's
            if not image.class_outside:
                order = torch.cat((order[:place], order.new_full((1,), place), order[place:]))
        found.append(order)
    return ScanOrders(torch.stack(found), image.class_place(patches) if image.class_outside else None)
