"""One token of the causal short convolution in Triton, in one launch.

A program takes a block of channels of one batch row. All of the memory is read before any is written, so the new one
may lie where the old one was.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import launch
from matmix.kernels.short_conv.chunked import ConvStepInputs

CHANNELS = 128
"""Channels of a program: one per thread, as few programs would leave most of a GPU idle."""


@triton.jit
def advance_window(
    x, x_b, x_c, weight, weight_c, weight_t, bias, bias_c, state, state_b, state_c, state_t, out, out_b, out_c, out_t,
    y, channels, C: tl.constexpr,
):  # fmt: skip
    """y = activation(bias + sum of taps times [state | x]), and out, the last WIDTH - 1 of [state | x]."""
    blocks = tl.cdiv(channels, C.CHANNELS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks).to(tl.int64) * C.CHANNELS + tl.arange(0, C.CHANNELS)
    there = c < channels
    new = tl.load(x + b * x_b + c * x_c, there, other=0.0)
    weight += c * weight_c
    total = new.to(tl.float32) * tl.load(weight + (C.WIDTH - 1) * weight_t, there, other=0.0).to(tl.float32)
    window = ()
    for tap in tl.static_range(C.WIDTH - 1):
        held = tl.load(state + b * state_b + c * state_c + tap * state_t, there, other=0.0)
        total += held.to(tl.float32) * tl.load(weight + tap * weight_t, there, other=0.0).to(tl.float32)
        window += (held,)
    if C.BIAS:
        total += tl.load(bias + c * bias_c, there, other=0.0).to(tl.float32)
    if C.SILU:
        total = total * tl.sigmoid(total)
    # Another thread may still read what this one is about to write.
    tl.debug_barrier()
    at = out + b * out_b + c * out_c
    for tap in tl.static_range(C.WIDTH - 2):
        tl.store(at + tap * out_t, window[tap + 1], there)
    tl.store(at + (C.WIDTH - 2) * out_t, new.to(out.dtype.element_ty), there)
    tl.store(y + b * channels + c, total.to(y.dtype.element_ty), there)


def forward(given: ConvStepInputs, in_place: bool) -> tuple[Tensor, Tensor]:
    """See `conv_step_forward` of the PyTorch form."""
    x, state, weight, bias, activation = given
    batch, channels = x.shape
    out = state if in_place else torch.empty_like(state, memory_format=torch.contiguous_format)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(
        advance_window, (batch * triton.cdiv(channels, CHANNELS),),
        x, *x.stride(), weight, *weight.stride(), bias, 0 if bias is None else bias.stride(0),
        state, *state.stride(), out, *out.stride(), y, channels,
        num_warps=4, num_stages=1,
        WIDTH=weight.shape[1], SILU=activation == "silu", BIAS=bias is not None, CHANNELS=CHANNELS,
    )  # fmt: skip
    return y, out
