"""Forward pass of the chunked scans, for one direction or two."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.precision import outside_autocast
from matmix.kernels.semiseparable.chunked.matrices import chunk_matrices, multiply_by_group, own_terms, token_factor
from matmix.kernels.semiseparable.chunked.setup import chunk_blocks, scan_dtype, set_up_scan, spread_heads
from matmix.kernels.semiseparable.chunked.states import entering_states, ungrouped_rows
from matmix.kernels.semiseparable.form import ScanForm, ScanOutput, ScanSide


@outside_autocast
def scan_forward(
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    final_state: bool,
) -> ScanOutput:
    """The scan of one direction or two as `form` says; `final_state` asks for the first side's last state."""
    if form.normalize:
        y, _ = linear_forward(with_ones(v), sides, diagonal, form, cu_seqlens, chunk_size, False)
        row_sum = y[..., -1].contiguous()
        exact = y[..., :-1] / (row_sum + form.eps).unsqueeze(-1)
        y = exact.to(v.dtype)
        return ScanOutput(y, row_sum, None, None if y.dtype == exact.dtype else (exact - y).to(v.dtype))
    if form.combine == "add" or len(sides) == 1:
        y, final = linear_forward(v, sides, diagonal, form, cu_seqlens, chunk_size, final_state)
        return ScanOutput(y, None, final)
    if form.combine == "concat":
        halves = [linear_forward(v, (side,), diagonal, form, cu_seqlens, chunk_size, False)[0] for side in sides]
        return ScanOutput(torch.cat(halves, -1), None, None)
    exact = v.to(scan_dtype(v))
    y, other = (linear_forward(exact, (side,), None, form, cu_seqlens, chunk_size, False)[0] for side in sides)
    y.mul_(other)
    if diagonal is not None:
        y.addcmul_(diagonal.to(y.dtype).unsqueeze(-1), exact)
    return ScanOutput(y.to(v.dtype), None, None)


def with_ones(v: Tensor) -> Tensor:
    """Values with a column of ones, whose output is the sum of each row of the mixer."""
    v = v.to(scan_dtype(v))
    return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)


def linear_forward(
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sum of all sides: output (as v) and, if asked for, the final state of the first side."""
    setup = set_up_scan(v, sides, form, cu_seqlens, chunk_size, final_state)
    layout, dtype = setup.layout, setup.dtype
    heads = v.shape[2]
    chunks = layout.split(v)
    states: list[Tensor | None] = []
    final = None
    for number, carries in enumerate(setup.carries):
        wanted = final_state and number == 0
        entering, end = entering_states(chunks, setup, number) if carries or wanted else (None, None)
        states.append(entering)
        final = end if wanted else final
    diagonal = spread_heads(diagonal, layout, dtype)
    y = torch.empty_like(chunks, memory_format=torch.contiguous_format)
    for at in chunk_blocks(setup):
        values = chunks[at].to(dtype).transpose(1, 2).contiguous()
        pairs, _, matrix, weights = chunk_matrices(setup, at, heads)
        out = multiply_by_group(matrix, weights) @ values
        factor = token_factor(setup, at, own_terms(setup, pairs, heads), diagonal)
        if factor is not None:
            out.addcmul_(factor.unsqueeze(-1), values)
        out = out.transpose(1, 2)
        for (q, _), entering, decay in zip(pairs, states, setup.decays, strict=True):
            if entering is not None:
                out.addcmul_(ungrouped_rows(q @ entering[at], heads), decay.enter[at].unsqueeze(-1))
        y[at] = out
    return layout.join(y), final
