"""Decays of one scan direction inside chunks: cumulative log-decays, and how their gradients come back."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.documents import ChunkLayout
from matmix.kernels.semiseparable.form import LARGEST_LOG_DECAY, ScanSide

SMALLEST_LOG_DECAY = -1000.0
"""exp of this is 0 in float64 too; a bound keeps sums finite when a decay of exactly 0 (log -inf) is given."""


class RunningSums(NamedTuple):
    """How sums over the tokens of a chunk run along with one direction of the scan."""

    reverse: bool
    earlier: Tensor | None
    """(M, chunk, chunk) in the dense layout of packed documents: 1 where the column is a token of the row's document
    that the direction meets before it. A product with it, not a difference of sums over the whole chunk, keeps the
    rounding of a document's neighbours out of it."""

    def over(self, x: Tensor, *, own: bool = True, back: bool = False) -> Tensor:
        """(M, chunk, nheads) -> the same: at each token the sum over those before it in the direction, or, with `back`,
        against it; `own`: and itself."""
        if self.earlier is not None:
            sums = (self.earlier.mT if back else self.earlier) @ x
            return sums.add_(x) if own else sums
        against = self.reverse != back
        sums = (x.flip(1) if against else x).cumsum(1)
        sums = sums if own else pad(sums[:, :-1], (0, 0, 1, 0))
        return sums.flip(1) if against else sums


class SideDecay(NamedTuple):
    """Cumulative decays of one direction; `hi + lo` is the sum to nearly twice the working precision.

    A difference of two long sums of strong decays, rounded, would lose the weak decays between them. In rows and
    columns every step's log-decay is counted from its upper bound, so that it is never positive: `growth` gives
    back what that takes away.
    """

    row_hi: Tensor
    """(M, nheads, chunk): log-decay from the chunk's edge (or the document's) to where the row reads."""
    row_lo: Tensor | None
    col_hi: Tensor
    """(M, nheads, chunk): the same, to where the column has written."""
    col_lo: Tensor | None
    enter: Tensor
    """(M, chunk, nheads): decay of the entering state until the row reads it; 0 in another document."""
    leave: Tensor
    """(M, chunk, nheads): decay of what the column wrote until it leaves the chunk; 0 in another document."""
    total: Tensor
    """(M, nheads): decay of the entering state until it leaves; 0 where a document ends in between."""
    running: RunningSums

    def log_matrix(self, at: slice) -> Tensor:
        """(m, nheads, chunk, chunk) log-decay from column to row, without `growth`: at most 0 in the direction's
        triangle and, inside a document, at least 0 outside it."""
        matrix = self.row_hi[at].unsqueeze(-1) - self.col_hi[at].unsqueeze(-2)
        if self.row_lo is not None:
            matrix += self.row_lo[at].unsqueeze(-1)
            matrix -= self.col_lo[at].unsqueeze(-2)
        return matrix


def growth(chunk: int, exclusive: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(chunk, chunk) decay from column to row if every step's were the largest there can be."""
    positions = torch.arange(chunk, device=device, dtype=widest_dtype(device))
    steps = (positions[:, None] - positions).abs() - int(exclusive)
    return (LARGEST_LOG_DECAY * steps).exp().to(dtype)


def widest_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def side_decay(
    side: ScanSide, layout: ChunkLayout, heads: int, exclusive: bool, dtype: torch.dtype, same_document: Tensor | None
) -> SideDecay:
    """Cumulative decays of one direction. `exclusive`: rows read before their own token's decay. same_document (M,
    chunk, chunk) in the dense layout of packed documents."""
    log_decay, reverse, device = side.log_decay, side.reverse, side.q.device
    wide = widest_dtype(device)
    if log_decay is None:
        log_decay = torch.zeros(heads, dtype=wide, device=device)
    if log_decay.dim() == 1:
        log_decay = log_decay.expand(layout.rows if layout.gather is None else 1, layout.seqlen, heads)
    steps = layout.split(log_decay.to(wide)).clamp(SMALLEST_LOG_DECAY, LARGEST_LOG_DECAY)
    earlier = None
    if same_document is not None:
        earlier = (same_document.triu(1) if reverse else same_document.tril(-1)).to(wide)
    running = RunningSums(reverse, earlier)
    cols = running.over(steps)
    rows = running.over(steps, own=False) if exclusive else cols
    end = cols[:, :1] if reverse else cols[:, -1:]
    # Between documents a difference means nothing and could be anything: bounded, not to give inf * 0.
    leave = (end - cols).clamp_(max=LARGEST_LOG_DECAY * layout.chunk).exp_()
    enter, total = rows.exp(), end[:, 0].exp()
    if layout.documents is not None:
        entry = layout.right if reverse else layout.left
        edge = layout.documents[:, :1] if reverse else layout.documents[:, -1:]
        enter.mul_((layout.documents == entry[:, None])[..., None])
        leave.mul_((layout.documents == edge)[..., None])
        total.mul_((entry == edge[:, 0])[:, None])
    steps_until = torch.arange(layout.chunk, dtype=wide, device=device).add_(1)
    bound = LARGEST_LOG_DECAY * (steps_until.flip(0) if reverse else steps_until).unsqueeze(-1)
    col_hi, col_lo = split_precision(cols - bound, dtype)
    if exclusive:
        row_hi, row_lo = split_precision(rows - (bound - LARGEST_LOG_DECAY), dtype)
    else:
        row_hi, row_lo = col_hi, col_lo
    return SideDecay(row_hi, row_lo, col_hi, col_lo, enter.to(dtype), leave.to(dtype), total.to(dtype), running)


def split_precision(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(M, chunk, nheads) -> (M, nheads, chunk) as a rounded value and what rounding left over."""
    x = x.transpose(1, 2)
    hi = x.to(dtype, memory_format=torch.contiguous_format)
    return hi, None if x.dtype == dtype else (x - hi).to(dtype).contiguous()


def side_decay_backward(
    decay: SideDecay, drow: Tensor, dcol: Tensor, dleave: Tensor | None, dtotal: Tensor | None, exclusive: bool
) -> Tensor:
    """Gradient of the log-decays, (M, chunk, nheads), from those of the exponents.

    drow and dcol: of the sums up to rows and columns (the latter with the opposite sign); dleave: of the sums
    from a column to the edge; dtotal (M, nheads): of the sum over the whole chunk. All (M, chunk, nheads) but
    the last, drow and dcol in the widest dtype of the device.
    """
    running = decay.running
    gradient = running.over(drow, own=not exclusive, back=True) - running.over(dcol, back=True)
    if dleave is not None:
        # Everything written strictly before a token passes that token's decay on its way out. Summed from
        # that side no large terms cancel, and a document's own mask keeps the others out.
        gradient += running.over(dleave.to(drow.dtype), own=False)
    if dtotal is not None:
        gradient += dtotal.unsqueeze(1)
    return gradient
