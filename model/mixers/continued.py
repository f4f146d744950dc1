"""Packed documents that go on from states: what stands in front of their first tokens, and what their last ones are."""

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.context import Context, Crossing, from_left, within_part
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
    def of(cls, x: Tensor, window: Tensor, cu_seqlens: Tensor, context: Context | None = None) -> "Continued":
        """x (1, L, C), in a context a part; window (documents, W, C), zeros where there was nothing; cu_seqlens
        (documents + 1,). No value is read on the host."""
        if context is not None:
            window, cu_seqlens = _windows_here(x, window, cu_seqlens, context), within_part(cu_seqlens, x.shape[1])
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


def _windows_here(x: Tensor, window: Tensor, cu_seqlens: Tensor, context: Context) -> Tensor:
    """Returns `window`, typed like x, with what the rank before has last of a document that began there."""
    width, length = window.shape[1], x.shape[1]
    if length < width:
        raise ValueError(f"a part of {length} tokens is shorter than a window of {width}; set engine.context lower")
    window = window.to(x.dtype)
    places = torch.arange(length - width, length, device=x.device) - cu_seqlens[-2]  # in the last document
    before = window[-1].index_select(0, (places + width).clamp(0, width - 1))
    last = torch.where(places.unsqueeze(1) >= 0, x[0, length - width :], before)
    first = torch.where(Crossing.of(cu_seqlens, length).left, from_left(last, context), window[0])
    return torch.cat([first.unsqueeze(0), window[1:]])


def tokens_before(
    x: Tensor, last: Tensor, cu_seqlens: Tensor | None = None, context: Context | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the token before each of x (B, L, C), and the last ones (B or documents, C) in memory of their own. last:
    those before the first of each row or packed document. context: of a part of packed documents."""
    if cu_seqlens is None:
        seen = torch.cat([last.to(x.dtype).unsqueeze(1), x], 1)
        # A copy, or else the last token would keep all of a long prompt in memory.
        return seen[:, :-1], seen[:, -1].clone()
    continued = Continued.of(x, last.unsqueeze(1), cu_seqlens, context)
    return continued.x[:, continued.places - 1], continued.window.squeeze(1)
