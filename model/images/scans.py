"""The orders in which the patches of a picture are read: permutations (rows * columns,) of the numbers that they have
row by row in a `grid` (rows, columns), int64."""

import torch
from torch import Tensor

from matmix.model.images.config import ImageConfig
from matmix.model.mixers.base import ScanOrders


def column_order(grid: Tensor) -> Tensor:
    """Column by column from top to bottom."""
    return grid.T.flatten()


def row_snake(grid: Tensor) -> Tensor:
    """Row by row, every second one from right to left."""
    backwards = torch.arange(len(grid), device=grid.device).unsqueeze(1) % 2 == 1
    return torch.where(backwards, grid.flip(1), grid).flatten()


def column_snake(grid: Tensor) -> Tensor:
    """Column by column, every second one from bottom to top."""
    return row_snake(grid.T)


def hilbert_order(grid: Tensor) -> Tensor:
    """Along the Hilbert curve of the smallest square of 2^n x 2^n that holds the grid, left out what lies outside of
    the grid. Neighbours on it are neighbours in the picture, but for jumps past what was left out."""
    rows, columns = grid.shape
    y = torch.arange(rows, device=grid.device).unsqueeze(1).expand(rows, columns).flatten()
    x = torch.arange(columns, device=grid.device).repeat(rows)
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
    "row": (torch.flatten,),
    "column": (column_order,),
    "both": (torch.flatten, column_order),
    "snake": (row_snake, column_snake),
    "hilbert": (hilbert_order,),
}
"""`model.image.scan` -> its orders."""


def scan_count(image: ImageConfig) -> int:
    """The number of orders that are read and averaged."""
    return len(_SCANS[image.scan])


def scan_orders(image: ImageConfig, rows: int, columns: int, device: torch.device | None = None) -> ScanOrders | None:
    """The orders of all positions of an image of rows x columns patches, the class token in its place or outside; None
    where they are read as they stand."""
    if image.scan == "row" and not image.class_outside:
        return None
    patches, places = rows * columns, []
    for scan in _SCANS[image.scan]:
        order = scan(torch.arange(patches, device=device).view(rows, columns))
        if image.class_token != "none":
            place = image.class_place(patches)
            order = order + (order >= place)  # the class token's position is no patch's
            if not image.class_outside:
                order = torch.cat((order[:place], order.new_full((1,), place), order[place:]))
        places.append(order)
    return ScanOrders(torch.stack(places), image.class_place(patches) if image.class_outside else None)
