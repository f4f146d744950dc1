"""Packed documents that go on from states: what stands in front of their first tokens, and what their last ones are."""

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.documents import document_ids


class Continued(NamedTuple):
    """Packed documents (1, L, C), each behind the last W tokens that were before it."""

    x: Tensor
    """(1, L + documents W, C)"""
    cu_seqlens: Tensor
    """(documents + 1,) int32: their boundaries there; W tokens longer each."""
    places: Tensor
    """(L,) int64: where the tokens themselves are."""
    window: Tensor
    """(documents, W, C): the last W tokens of each, those before it among them if it is shorter."""

    @classmethod
    def of(cls, x: Tensor, window: Tensor, cu_seqlens: Tensor) -> "Continued":
        """x (1, L, C); window (documents, W, C), zeros where there was nothing; cu_seqlens (documents + 1,). No value
        is read on the host."""
        (documents, width, channels), length = window.shape, x.shape[1]
        steps = torch.arange(width, device=x.device)
        shifts = width * torch.arange(documents + 1, device=x.device, dtype=cu_seqlens.dtype)
        bounds = cu_seqlens + shifts
        ids = document_ids(cu_seqlens, length)
        places = torch.arange(length, device=x.device) + width * (ids + 1)
        fronts = (bounds[:-1].long().unsqueeze(1) + steps).flatten()
        longer = x.new_zeros(length + documents * width, channels)
        longer = longer.index_copy(0, fronts, window.to(x.dtype).flatten(0, 1)).index_copy(0, places, x[0])
        last = (bounds[1:].long() - width).unsqueeze(1) + steps
        return cls(longer.unsqueeze(0), bounds, places, longer[last])


def tokens_before(x: Tensor, last: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the token before each of x (B, L, C), and the last ones (B or documents, C) in memory of their own. last:
    those before the first of each row or packed document."""
    if cu_seqlens is None:
        seen = torch.cat([last.to(x.dtype).unsqueeze(1), x], 1)
        # A copy, or else the last token would keep all of a long prompt in memory.
        return seen[:, :-1], seen[:, -1].clone()
    continued = Continued.of(x, last.unsqueeze(1), cu_seqlens)
    return continued.x[:, continued.places - 1], continued.window.squeeze(1)
