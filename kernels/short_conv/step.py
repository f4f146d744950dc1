"""The causal short convolution for a single token, which generation uses: checks, backend choice, registration."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation
from matmix.kernels.checks import (
    check_choice,
    check_finite,
    check_floating,
    check_no_gradients,
    check_own_memory,
    check_shape,
    transformed,
    wants_gradients,
)
from matmix.kernels.short_conv.chunked import conv_step_forward, short_conv_step_torch


def short_conv_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """What `short_conv` with `causal=True` does to a sequence, for one token: y = weight . [state | x] in each channel,
    plus bias, activated.

    The Triton form is one launch, waits for nothing, and can be captured in a CUDA graph.

    Args:
        x: (batch, d).
        state: the inputs of the width - 1 tokens before, the oldest first, (batch, d, width - 1); zeros at first.
        weight: (d, width), width 2 to 9.
        bias: (d,) or None.
        activation: None or "silu".
        in_place: write the new state into the memory of `state`, which is then what is returned; else `state` is left
            as it is.
        backend: "auto", "torch" or "triton".

    Returns:
        y (batch, d) typed like x, and [state | x] without its oldest token, shaped and typed like `state`. Sums are
        float32 (float64 for float64 inputs). Gradients come from the PyTorch form: where an input requires one, "auto"
        takes it, and "triton" and `in_place` are errors.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "short_conv_step"
    for name, tensor in {"x": x, "state": state, "weight": weight}.items():
        if tensor is None:
            raise ValueError(f"{op}: {name} is None; give a floating-point tensor")
    given = {"x": x, "state": state, "weight": weight, "bias": bias}
    check_floating(op, **given)
    if x.dim() != 2 or 0 in x.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (batch, d), none of them 0")
    width = weight.shape[-1]
    check_shape(op, "weight", weight, (x.shape[1], width))
    if not 2 <= width <= 9:
        raise ValueError(f"{op}: weight has {width} taps; give 2 to 9")
    if bias is not None:
        check_shape(op, "bias", bias, (x.shape[1],))
    check_shape(op, "state", state, (*x.shape, width - 1))
    check_choice(op, "activation", activation, (None, "silu"))
    check_finite(op, **given)
    check_backend(op, backend, x)
    check_no_gradients(op, in_place, backend, *given.values())
    if in_place:
        check_own_memory(op, "state", state)
        return torch.ops.matmix.short_conv_step_(x, state, weight, bias, activation, backend), state
    if wants_gradients(*given.values()) or transformed():
        return short_conv_step_torch(x, state, weight, bias, activation=activation)
    return torch.ops.matmix.short_conv_step(x, state, weight, bias, activation, backend)


@torch.library.custom_op("matmix::short_conv_step", mutates_args=())
def _conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, backend: str
) -> tuple[Tensor, Tensor]:
    run = implementation("short_conv_step", "forward", conv_step_forward, backend, x)
    y, new = run(x, state, weight, bias, activation, False)
    return y.contiguous(), new.contiguous()


@_conv_step.register_fake
def _(x, state, *_):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, state))


@torch.library.custom_op("matmix::short_conv_step_", mutates_args=("state",))
def _conv_step_in_place(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, backend: str
) -> Tensor:
    run = implementation("short_conv_step", "forward", conv_step_forward, backend, x)
    return run(x, state, weight, bias, activation, True)[0].contiguous()


@_conv_step_in_place.register_fake
def _(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _flops(x_shape, state_shape, weight_shape, *_, **__) -> int:
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


register_flop_formula(torch.ops.matmix.short_conv_step)(_flops)
register_flop_formula(torch.ops.matmix.short_conv_step_)(_flops)
