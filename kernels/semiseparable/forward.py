"""Forward pass of the chunked scans, for one direction or two."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.semiseparable.matrices import chunk_scores, own_products, own_scale
from matmix.kernels.semiseparable.setup import (
    ScanSide,
    set_up_scan,
    slabs_of,
    spread_heads,
)
from matmix.kernels.semiseparable.states import entering_states, ungrouped_rows


def scan_forward(
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    exclusive: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output (as v) and, if asked for, the final state of the first side."""
    setup = set_up_scan(v, sides, exclusive, cu_seqlens, chunk_size, final_state)
    layout, dtype, groups = setup.layout, setup.dtype, setup.groups
    heads, _headdim = v.shape[2:]
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
    for at in slabs_of(setup):
        values = chunks[at].to(dtype).transpose(1, 2).contiguous()
        pairs, scores, matrix, scale = chunk_scores(setup, at)
        matrix.unflatten(1, (groups, -1)).mul_(scores.unsqueeze(2))
        if scale is not None:
            matrix.mul_(scale)
        out = matrix @ values
        own = own_products(setup, pairs)
        if own is not None:
            own, side_scale = own_scale(setup, at, own, heads)
            out.addcmul_((own if side_scale is None else own * side_scale).unsqueeze(-1), values)
        if diagonal is not None:
            out.addcmul_(diagonal[at].transpose(1, 2).unsqueeze(-1), values)
        out = out.transpose(1, 2)
        for (q, _), entering, decay in zip(pairs, states, setup.decays, strict=True):
            if entering is not None:
                read = ungrouped_rows(q @ entering[at], heads)
                out = out + read.mul_(decay.enter[at].unsqueeze(-1))
        y[at] = out
    return layout.join(y), final
