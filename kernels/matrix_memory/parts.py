"""The matrix memory over ranks that hold parts of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.context import Context, within_part
from matmix.kernels.functions import working_dtype
from matmix.kernels.matrix_memory.chunked import MemoryInputs
from matmix.kernels.matrix_product.parts import Part, entering_part


def memory_in_parts(
    run: Callable[[MemoryInputs], tuple[Tensor, ...]], given: MemoryInputs, context: Context
) -> tuple[Tensor, Tensor]:
    """Outputs of this part and the last states of rows or documents that end in it, by `run`, the op for whole rows.

    It runs twice: first from zero, with the products of transitions as the states of more channels, to which nothing is
    added. One gather of both gives every rank the states that enter its part.
    """
    batch, seqlen, heads, width = given.values.shape
    part, order = Part.of(context, given.cu_seqlens, given.values), given.keys.shape[-1]
    rows = batch if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
    exact = working_dtype(given.values)
    starts = part.own(given.initial_state, first=True)
    starts = given.values.new_zeros((rows, heads, width, order), dtype=exact) if starts is None else starts.to(exact)
    given = given._replace(cu_seqlens=within_part(given.cu_seqlens, seqlen))
    identity = torch.eye(order, dtype=exact, device=starts.device).expand(rows, heads, -1, -1)
    wider = given._replace(values=pad(given.values, (0, order)), initial_state=torch.cat([starts, identity], 2))
    passed = part.edge(run(wider)[1], 1)
    entered = entering_part(passed.mT, part).mT
    y, final, *_ = run(given._replace(initial_state=part.with_edge(starts, 0, part.edge(starts, 0) + entered)))
    return y, part.own(final, first=False)
