"""One token of the semiseparable scan in Triton, in one launch.

A program holds a block of columns of one head's state: it decays them, adds the outer product, stores them and sums
them up with q. Every element is read and written once, by the program that it belongs to, so the new state may lie in
the memory of the old one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import ForcedConfiguration, launch, rows_in_place
from matmix.kernels.semiseparable.chunked.forward import ScanStepInputs

HIGHEST: tl.constexpr = tl.constexpr(0.01)
"""LARGEST_LOG_DECAY: values on the device cannot be refused without waiting for it."""


class StepConfig(NamedTuple):
    """Tile sizes and launch options."""

    rows: int
    """Rows of the state (of d_state) that are taken at once."""
    columns: int
    """Columns of the state (of headdim) in a program."""
    num_warps: int


_FEW_HEADS = StepConfig(rows=128, columns=16, num_warps=4)
_MANY_HEADS = StepConfig(rows=64, columns=64, num_warps=4)

force_configuration = ForcedConfiguration()


def configurations() -> tuple[StepConfig, ...]:
    """All configurations that `choose_config` can return."""
    return _FEW_HEADS, _MANY_HEADS


def choose_config(heads: int) -> StepConfig:
    """Chooses by the heads of all rows of the batch: where they are few, each is cut into more programs."""
    if force_configuration.value is not None:
        return force_configuration.value
    return _FEW_HEADS if heads < 512 else _MANY_HEADS


@triton.jit(do_not_specialize=["heads", "share"])
def advance_state(
    v, v_b, v_h, q, q_b, q_g, k, k_b, k_g, decay, decay_b, decay_h, scale, scale_b, scale_h, diagonal, diagonal_b,
    diagonal_h, state, state_b, state_h, state_n, state_p, out, out_b, out_h, out_n, out_p, y, heads, share,
    C: tl.constexpr,
):  # fmt: skip
    """out = exp(decay) state + scale k v^T and y = q^T out + diagonal v, for COLUMNS columns of one head."""
    unit = tl.program_id(0).to(tl.int64)
    b, h = unit // heads, unit % heads
    p = tl.program_id(1) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    values = tl.load(v + b * v_b + h * v_h + p, p < C.HEADDIM, other=0.0).to(tl.float32)
    written = values
    if C.SCALE:
        written *= tl.load(scale + b * scale_b + h * scale_h).to(tl.float32)
    factor = 1.0
    if C.DECAY:
        # A NaN stays one.
        log_decay = tl.load(decay + b * decay_b + h * decay_h).to(tl.float32)
        factor = tl.exp(tl.where(log_decay > HIGHEST, HIGHEST, log_decay))
    q += b * q_b + h // share * q_g
    k += b * k_b + h // share * k_g
    state += b * state_b + h * state_h + p[None, :] * state_p
    out += b * out_b + h * out_h + p[None, :] * out_p
    total = tl.zeros((C.COLUMNS,), tl.float32)
    for first in range(0, C.D_STATE, C.ROWS):
        n = first + tl.arange(0, C.ROWS)
        there = (n < C.D_STATE)[:, None] & (p < C.HEADDIM)[None, :]
        key = tl.load(k + n, n < C.D_STATE, other=0.0).to(tl.float32)
        query = tl.load(q + n, n < C.D_STATE, other=0.0).to(tl.float32)
        held = tl.load(state + n[:, None] * state_n, there, other=0.0)
        if C.DECAY:
            held *= factor
        held += key[:, None] * written[None, :]
        tl.store(out + n[:, None] * out_n, held, there)
        total += tl.sum(query[:, None] * held, 0)
    if C.DIAGONAL:
        total += tl.load(diagonal + b * diagonal_b + h * diagonal_h).to(tl.float32) * values
    tl.store(y + unit * C.HEADDIM + p, total.to(y.dtype.element_ty), p < C.HEADDIM)


def forward(given: ScanStepInputs, in_place: bool) -> tuple[Tensor, Tensor]:
    """See `step_forward` of the PyTorch form."""
    v, q, k, log_decay, state, input_scale, diagonal = given
    batch, heads, headdim = v.shape
    groups, d_state = q.shape[1:]
    config = choose_config(batch * heads)
    rows = min(config.rows, triton.next_power_of_2(d_state))
    columns = min(config.columns, triton.next_power_of_2(headdim))
    v, q, k = rows_in_place(v), rows_in_place(q), rows_in_place(k)
    out = state if in_place else torch.empty_like(state, memory_format=torch.contiguous_format)
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    launch(
        advance_state, (batch * heads, triton.cdiv(headdim, columns)),
        v, *v.stride()[:2], q, *q.stride()[:2], k, *k.stride()[:2],
        *_per_head(log_decay), *_per_head(input_scale), *_per_head(diagonal),
        state, *state.stride(), out, *out.stride(), y, heads, heads // groups,
        num_warps=config.num_warps, num_stages=1,
        DECAY=log_decay is not None, SCALE=input_scale is not None, DIAGONAL=diagonal is not None,
        D_STATE=d_state, HEADDIM=headdim, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return y, out


def _per_head(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A factor (batch, nheads) or (nheads,) with its strides, which are zero along what it does not have."""
    if x is None:
        return None, 0, 0
    return (x, 0, x.stride(0)) if x.dim() == 1 else (x, x.stride(0), x.stride(1))
