"""The definition of the selective scan in float64, with which the fast forms are compared."""

import itertools

import torch
from torch import Tensor


def s6_definition(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = h_t . C_t, token by token (arXiv 2312.00752, section 3.2). See
    `s6_scan`."""
    x, dt, b, c, rates = (one.to(torch.float64) for one in (x, dt, b, c, rates))
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [x[:, :0]], []
    for document, (begin, end) in enumerate(itertools.pairwise(bounds)):
        state = x.new_zeros(len(x), *rates.shape)
        if initial_state is not None:
            state = initial_state.to(torch.float64)[document : document + len(x)]
        for t in range(begin, end):
            written = (dt[:, t] * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
            state = (dt[:, t].unsqueeze(-1) * rates).exp() * state + written
            outputs.append((state * c[:, t].unsqueeze(1)).sum(-1).unsqueeze(1))
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)
