"""The definition of the matrix memory in float64, with which the fast forms are compared."""

import itertools
from typing import Any

import torch
from torch import Tensor

from matmix.kernels.matrix_memory.chunked import MemoryInputs


def transitions_definition(elements: Tensor) -> Tensor:
    """A (..., N, N) from M (..., N N): the rows of I + M, each divided by its absolute sum where that is above 1."""
    order = round(elements.shape[-1] ** 0.5)
    rows = elements.double().unflatten(-1, (order, order)) + torch.eye(order, dtype=torch.float64)
    sums = rows.abs().sum(-1, keepdim=True)
    return rows / torch.where(sums > 1, sums, 1.0)  # at 1 the gradient is that of the rows


def matrix_memory_definition(
    *tensors: Tensor, return_final_state: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """S_t = S_{t-1} A_t + v_t (rates k_t)^T, y_t = S_t q_t, token by token; arguments as in
    `matmix.kernels.matrix_memory`."""
    given = MemoryInputs(*tensors, **options)
    v, k, q, rates = (x.double() for x in (given.values, given.keys, given.queries, given.rates))
    turns = transitions_definition(given.elements)
    bounds = [0, v.shape[1]] if given.cu_seqlens is None else given.cu_seqlens.tolist()
    outputs, states = [v[:, :0]], []
    for document, (begin, end) in enumerate(itertools.pairwise(bounds)):
        state = v.new_zeros(*v.shape[:1], *v.shape[2:], k.shape[-1])
        if given.initial_state is not None:
            state = given.initial_state.double()[document : document + len(v)]
        for t in range(begin, end):
            written = k[:, t, None] * rates
            state = state @ turns[:, t] + v[:, t].unsqueeze(-1) * written.unsqueeze(-2)
            outputs.append((state @ q[:, t, None, :, None]).squeeze(-1).unsqueeze(1))
        states.append(state)
    y = torch.cat(outputs, 1)
    return (y, torch.cat(states)) if return_final_state else y
