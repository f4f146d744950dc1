"""Several orders of one sequence, each of which a mixer reads: pictures have rows and columns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScanOrders(NamedTuple):
    """The orders in which a sequence of L positions is read."""

    places: torch.Tensor
    """(orders, n) int64: the position that is read as t-th; n = L, or L - 1 with one position outside."""
    outside: int | None = None
    """A position that belongs to no order: it is near to all others alike."""

    def inverse(self) -> torch.Tensor:
        """(orders, n) int64: when each of the positions, but for the one outside, is read."""
        places = self.places
        if self.outside is not None:
            places = places - (places > self.outside).long()
        return places.argsort(1)
