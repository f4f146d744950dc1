"""What the short convolution over a sequence takes, and the convolution of a part of one, whose other parts other
ranks hold (see `kernels.context`), by any form of the convolution.

The form first takes the part for a whole sequence. Outputs near an edge, which depend on a few rows of the neighbour,
are then computed once more, from a window of [the neighbour's last rows | the first rows here], and of a centred
convolution [the last rows here | the neighbour's first rows]. Backward each output's gradient goes through the one of
the two that the output comes from, and those of the neighbour's rows are sent back.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.context import Context, from_neighbours, within_part
from matmix.kernels.functions import Form, Output


class ConvInputs(NamedTuple):
    """The arguments of matmix::short_conv."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    causal: bool = False
    activation: str | None = None
    cu_seqlens: Tensor | None = None
    context: str = ""
    """The name of the ranks that hold the other parts of the rows; "" for whole rows."""

    @property
    def left(self) -> int:
        """The number of earlier tokens that an output is made of."""
        width = self.weight.shape[1]
        return width - 1 if self.causal else width // 2

    @property
    def right(self) -> int:
        """The number of later ones."""
        return self.weight.shape[1] - 1 - self.left


def forward(form: Form, given: ConvInputs) -> Tensor:
    """The output of a form, for a whole sequence or a part."""
    if not given.context:
        return form.forward(given)
    left, right = given.left, given.right
    windows = _windows(given)
    y = form.forward(_alone(given))
    at_edges = _by_row(form.forward(windows), given)
    y[:, :left] = at_edges[:, left : 2 * left]
    if right:
        y[:, -right:] = at_edges[:, -2 * right : -right]
    return y


def backward(form: Form, given: ConvInputs, outputs: Output, cotangents: Output) -> tuple[Tensor | None, ...]:
    """The gradients by a form, for a whole sequence or a part."""
    if not given.context:
        return form.backward(given, outputs, cotangents)
    left, right = given.left, given.right
    reach = left + right
    windows = _windows(given)
    inner = cotangents.y.clone(memory_format=torch.contiguous_format)
    at_edges = inner.new_zeros(*inner.shape[:1], *_by_row(windows.x, given).shape[1:])
    at_edges[:, left : 2 * left] = inner[:, :left]
    inner[:, :left] = 0
    if right:
        at_edges[:, -2 * right : -right] = inner[:, -right:]
        inner[:, -right:] = 0
    dx, *of_parameters = form.backward(_alone(given), outputs, Output(inner))
    dwindows, *of_edges = form.backward(windows, outputs, Output(at_edges.view_as(windows.x)))
    dwindows = _by_row(dwindows, given)
    to_left, to_right = dwindows[:, :left], dwindows[:, -right:] if right else None
    from_left, from_right = from_neighbours(Context.named(given.context), to_left, to_right)
    dx[:, :reach] += dwindows[:, left : left + reach]
    dx[:, -left:] += from_right
    if right:
        dx[:, -reach:] += dwindows[:, -right - reach : -right]
        dx[:, :right] += from_left
    return dx, *(None if one is None else one + other for one, other in zip(of_parameters, of_edges, strict=True))


def _alone(given: ConvInputs) -> ConvInputs:
    """The convolution of the part as if there were nothing beyond it."""
    return given._replace(cu_seqlens=within_part(given.cu_seqlens, given.x.shape[1]), context="")


def _by_row(x: Tensor, given: ConvInputs) -> Tensor:
    """(rows, tokens of all windows of a row, d)."""
    return x.view(given.x.shape[0], -1, x.shape[2])


def _windows(given: ConvInputs) -> ConvInputs:
    """The convolution of the windows: rows of their own, or where documents are packed, documents in one row. All ranks
    call it at the same time."""
    x, bounds, left, right = given.x, given.cu_seqlens, given.left, given.right
    seqlen, d = x.shape[1:]
    reach = left + right
    width = left + reach
    before, behind = from_neighbours(Context.named(given.context), x[:, :right] if right else None, x[:, -left:])
    rows = [before, x[:, :reach], *([x[:, -reach:], behind] if right else [])]
    if bounds is None:
        return given._replace(x=torch.cat(rows, 1).view(-1, width, d), context="")
    # What a neighbour has of other documents may be NaN, and stands in one document here.
    begin = bounds.where(bounds <= 0, -left).amax()
    rows[0] = _kept(before, torch.arange(-left, 0, device=x.device) >= begin)
    of_windows = [pad((bounds + left).clamp(0, width), (1, 0))]
    if right:
        end = bounds.where(bounds >= seqlen, seqlen + right).amin()
        rows[3] = _kept(behind, torch.arange(seqlen, seqlen + right, device=x.device) < end)
        last = (bounds - (seqlen - reach)).clamp(0, width) + width
        of_windows.append(pad(last, (0, 1), value=2 * width))
    return given._replace(x=torch.cat(rows, 1), cu_seqlens=torch.cat(of_windows), context="")


def _kept(rows: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept[:, None], rows, rows.new_zeros(()))
