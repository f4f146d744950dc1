"""One token of the semiseparable scan in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.precision import outside_autocast
from matmix.kernels.semiseparable.form import LARGEST_LOG_DECAY


@outside_autocast
def step_forward(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    input_scale: Tensor | None,
    diagonal: Tensor | None,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """y (batch, nheads, headdim) typed like v, and the new state, with `in_place` in the memory of the given one."""
    groups, exact = q.shape[1], state.dtype
    values = v.to(exact)
    written = values if input_scale is None else values * input_scale.to(exact).unsqueeze(-1)
    # The heads of a group side by side: they share q and k, which are not copied.
    h, shares = state.unflatten(1, (groups, -1)), (groups, v.shape[1] // groups)
    if log_decay is not None:
        decay = log_decay.to(exact).clamp(max=LARGEST_LOG_DECAY).exp().unflatten(-1, shares)[..., None, None]
        h = h.mul_(decay) if in_place else h * decay
    k, written = k.to(exact)[:, :, None, :, None], written.unflatten(1, shares).unsqueeze(-2)
    h = h.addcmul_(k, written) if in_place else torch.addcmul(h, k, written)
    y = (q.to(exact)[:, :, None, None, :] @ h).squeeze(-2).flatten(1, 2)
    if diagonal is not None:
        y = y + diagonal.to(exact).unsqueeze(-1) * values
    return y.to(v.dtype), h.flatten(1, 2)


def semiseparable_step_torch(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    input_scale: Tensor | None = None,
    diagonal: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """`semiseparable_step` in PyTorch, without argument checks; see there."""
    return step_forward(v, q, k, log_decay, state, input_scale, diagonal, in_place)
