"""States that enter a part of rows from the ranks beside it (see `semiseparable.context`), in Triton.

The states of a part are passed as if nothing entered it. What enters is added afterwards, with its decay, to the stored
states of the document at the edge, so that the ranks can exchange states while these are being stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import launch
from matmix.kernels.semiseparable.context import Part, Passing, edge_gradient, edge_row, log_decays
from matmix.kernels.semiseparable.form import ScanCall, ScanSide
from matmix.kernels.semiseparable.fused.scan import Scan, one_or_two
from matmix.kernels.semiseparable.fused.states import States
from matmix.kernels.slots import bounds, first_slot


@triton.jit(do_not_specialize=["seqlen", "per_row", "elements"])
def add_entering(
    states, ends, entering, sums, documents, cu_seqlens, seqlen, per_row, heads, elements, C: tl.constexpr
):
    """Adds the state that enters a row, or the document at the edge of a packed one, in one direction, to those of all
    its chunks, and with FINAL to the state behind them. `documents`: those at the edges, by direction."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    directions: tl.constexpr = 2 if C.TWO else 1
    direction = tl.program_id(2) % directions
    e = tl.program_id(2) // directions * C.BLOCK + tl.arange(0, C.BLOCK)
    inside = e < elements
    reverse = (direction == 1) | C.REVERSE
    backward = reverse != C.COTANGENT
    document = tl.load(documents + direction).to(tl.int32) if C.PACKED else row
    begin, length = bounds(document, cu_seqlens, seqlen, C.PACKED)
    first = first_slot(document, begin, per_row, C.CHUNK, C.PACKED)
    chunks = tl.cdiv(length, C.CHUNK)
    of_row = (row.to(tl.int64) * heads + head) * directions + direction
    h = tl.load(entering + of_row * elements + e, mask=inside, other=0.0)
    for step in range(chunks):
        slot = (first + tl.where(backward, chunks - 1 - step, step)).to(tl.int64)
        of_slot = (slot * heads + head) * directions + direction
        at = states + of_slot * elements + e
        added = tl.load(at, mask=inside, other=0.0).to(tl.float32) + h
        tl.store(at, added.to(states.dtype.element_ty), mask=inside)
        if C.FACTORS:
            # Sums run from the direction's own side of the chunk on.
            last = sums + of_slot * (C.FACTORS * C.CHUNK) + tl.where(reverse, 0, C.CHUNK - 1)
            passed = tl.load(last)
            if C.EXACT:
                passed += tl.load(last + C.CHUNK)
            if C.TWO and C.GATED1 != C.GATED2:
                passed = tl.where((direction == 1) == C.GATED2, passed, 0.0)
            h *= tl.exp2(passed)
    if C.FINAL:
        of_document = (document.to(tl.int64) * heads + head) * directions + direction
        at = ends + of_document * elements + e
        tl.store(at, tl.load(at, mask=inside, other=0.0) + h, mask=inside)


class Entering:
    """What enters a part in a pass of the states of all directions, or of their cotangents."""

    def __init__(self, scan: Scan, call: ScanCall, part: Part, sums: Tensor | None, cotangent: bool = False) -> None:
        self.scan, self.call, self.part, self.sums, self.cotangent = scan, call, part, sums, cotangent
        self.passing: list[Passing] = []
        self.states: list[Tensor] = []
        """(rows, nheads, d_state, headdim) by direction, with a column more for the sums of rows."""
        self.rows: list[Tensor | None] = []
        """With shift: the q (rows, ngroups, d_state) before the part, or what the next rank's gradient of the last q
        is."""

    def rightwards(self, side: ScanSide) -> bool:
        return side.reverse == self.cotangent

    def send(self, ends: Tensor, vectors: Tensor | None) -> None:
        """Sends the states behind the part, of what `States` has."""
        for number, side in enumerate(self.call.sides):
            row = edge_row(side.q, self.rightwards(side)) if self.call.form.shift else None
            self._send(side, self._behind(number, ends, vectors), row)

    def send_back(
        self, entered: "Entering", dys: list[Tensor], drow_sum: Tensor | None, ends: Tensor, vectors: Tensor | None
    ) -> None:
        """Sends the cotangents of the states that `entered` the part, and of what was read with the rows that came
        along. dys: the gradients of what directions read, (batch, seqlen, nheads, headdim); drow_sum: of the sums of
        rows, (batch, seqlen, nheads)."""
        for number, (side, dy) in enumerate(zip(self.call.sides, dys, strict=True)):
            behind, row = self._behind(number, ends, vectors), None
            if self.call.form.shift:
                dy = edge_row(dy, side.reverse).to(behind.dtype)
                if drow_sum is not None:
                    dy = torch.cat([dy, edge_row(drow_sum, side.reverse).unsqueeze(-1)], -1)
                q = entered.rows[number].to(behind.dtype).repeat_interleave(self.scan.share, 1)
                behind = torch.addcmul(behind, q.unsqueeze(-1), dy.unsqueeze(-2))
                row = edge_gradient(entered.states[number], dy, self.scan.groups)
            self._send(side, behind, row)

    def _behind(self, number: int, ends: Tensor, vectors: Tensor | None) -> Tensor:
        last = self.rightwards(self.call.sides[number])
        states = self.part.at_edge(ends[:, :, number], last)
        if vectors is None:
            return states
        return torch.cat([states, self.part.at_edge(vectors[:, :, number], last).unsqueeze(-1)], -1)

    def _send(self, side: ScanSide, behind: Tensor, row: Tensor | None) -> None:
        decay = log_decays(side, self.scan.seqlen, behind)
        self.passing.append(Passing(self.part, self.rightwards(side), behind, decay, row))

    def add_to(self, states: States, final: bool) -> None:
        """Waits for what enters, and adds it to the stored states, and with `final` to those behind the documents."""
        self.states, self.rows = map(list, zip(*(under_way.wait() for under_way in self.passing), strict=True))
        entering = torch.stack(self.states, 2)
        edges = None
        if self.part.cu_seqlens is not None:
            sides = self.call.sides
            edges = torch.cat([self.part.edge_document(not self.rightwards(side)) for side in sides])
        width = self.scan.headdim
        self._add(states.states, states.ends if final else None, entering[..., :width].contiguous(), edges)
        if states.vectors is not None:
            self._add(states.vectors, states.end_vectors if final else None, entering[..., width].contiguous(), edges)

    def _add(self, states: Tensor, ends: Tensor | None, entering: Tensor, edges: Tensor | None) -> None:
        scan, count = self.scan, len(self.call.sides)
        first, second, _ = one_or_two(self.call.sides, self.call.form)
        elements = entering[0, 0, 0].numel()
        block = min(1024, triton.next_power_of_2(elements))
        launch(
            add_entering, (len(entering), scan.heads, -(-elements // block) * count),
            states, ends, entering, self.sums, edges, scan.cu_seqlens, scan.seqlen, scan.per_row(scan.chunk),
            scan.heads, elements, num_warps=4, TWO=count == 2, REVERSE=first.reverse, COTANGENT=self.cotangent,
            GATED1=first.log_decay is not None, GATED2=second.log_decay is not None, PACKED=edges is not None,
            CHUNK=scan.chunk, FACTORS=scan.factors(self.call.sides), EXACT=scan.exact, FINAL=ends is not None,
            BLOCK=block,
        )  # fmt: skip

    def read_at_edges(self, y: Tensor, row_sums: Tensor | None, rest: Tensor | None) -> None:
        """Adds to the outputs at the edges of the part, with shift, what they read with the rows from beside it. y
        (batch, seqlen, nheads, headdim), or with "concat" one such half for each direction. Of `row_sums`, which y is
        divided by, and of the `rest` of y as well."""
        for side, state, row, half in zip(self.call.sides, self.states, self.rows, self._halves(y), strict=True):
            q = row.to(state.dtype).repeat_interleave(self.scan.share, 1)
            edge, read = edge_row(half, side.reverse), torch.einsum("bhn,bhnp->bhp", q, state)
            if row_sums is None:
                edge.copy_(edge + read)
                continue
            sums, eps = edge_row(row_sums, side.reverse), self.call.form.eps
            left_off = torch.zeros_like(edge) if rest is None else edge_row(rest, side.reverse)
            # What was divided by zero was zero.
            divisor = (sums + eps).unsqueeze(-1)
            whole = ((edge.float() + left_off) * divisor).masked_fill(divisor == 0, 0)
            sums += read[..., -1]
            exact = (whole + read[..., :-1]) / (sums + eps).unsqueeze(-1)
            edge.copy_(exact)
            left_off.copy_(exact - edge)

    def _halves(self, y: Tensor) -> list[Tensor]:
        count = len(self.call.sides)
        return list(y.chunk(count, -1)) if self.call.form.combine == "concat" else [y] * count
