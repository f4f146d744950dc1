"""The layer around a scan as an op: checks, backend choice, registration with PyTorch.

Two registered ops are behind one function. `layer_scan` computes what stands before the gate and has no gradient of
its own; `scan_layer` takes its output, gates it, and has the backward pass of the whole. So selective checkpointing can
keep the output of the scan, by the name of its op, and compute the rest again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, takes_triton, triton_form
from matmix.kernels.checks import (
    check_choice,
    check_chunk_size,
    check_cu_seqlens,
    check_finite,
    check_floating,
    check_shape,
)
from matmix.kernels.gated_norm.op import _BACKWARD_FLOPS, _FORWARD_FLOPS
from matmix.kernels.scan_layer.chunked import scan_layer_torch
from matmix.kernels.scan_layer.form import LayerForm
from matmix.kernels.semiseparable.arguments import no_kernel_for, none_if_absent, or_empty
from matmix.kernels.semiseparable.flops import scan_flops


def scan_layer_is_fused(projected: Tensor, d_state: int, headdim: int, backend: str = "auto") -> bool:
    """Whether `scan_layer` runs as one operation, in Triton kernels, on a projection like this one."""
    return takes_triton(backend, projected) and not no_kernel_for(d_state, headdim)


def scan_layer(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    norm_weight: Tensor,
    *,
    nheads: int,
    ngroups: int,
    d_state: int,
    directions: int = 2,
    shift: bool = True,
    D: Tensor | None = None,
    diagonal_weight: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_first: bool = True,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    recompute: bool = False,
    backend: str = "auto",
) -> Tensor:
    """All that stands between the two large products of a Hydra or Mamba-2 layer: convolution with SiLU, step sizes,
    scan, gate and norm.

    With [z | v k q (k q) | raw] the input: (v k q ..) = silu(conv(v k q ..)), dt = clamp(softplus(raw + dt_bias)),
    y = scan(v, q, k, -dt exp(A_log), input_scale=dt), and the output is rmsnorm(y) norm_weight silu(z). The scan is
    `semiseparable_scan` with one direction (Mamba-2, arXiv 2405.21060), whose convolution is causal, and
    `quasiseparable_scan` with two (Hydra, arXiv 2407.09941).

    Args:
        projected: (batch, seqlen, width), columns z and v of nheads headdim each, then k and q (ngroups d_state each)
            of the forward and, with two directions, of the backward direction, then nheads raw step sizes of each.
        conv_weight: (channels, taps) for all columns from v to the last q; 2 to 9 taps, an odd number of them with two
            directions.
        conv_bias: (channels,) or None.
        dt_bias, A_log: (nheads,), or with two directions also (2, nheads).
        norm_weight: (nheads headdim,).
        nheads, ngroups, d_state: heads; groups of heads that share k and q; size of a k or q.
        directions: 1 or 2.
        shift: each of two directions moves one token on in its own sense; see `quasiseparable_scan`.
        D: (nheads,) or None: the weight of a token's own value.
        diagonal_weight: (nheads, nheads headdim) or None: it times a token's values is added to D.
        initial_states: (nheads, headdim, d_state) or None: what all documents, in both directions, start from.
        dt_limits: the least and the largest step size.
        eps: added to the mean square.
        group_size: channels that share a root mean square, a divisor of nheads headdim; None for all of them.
        norm_first: norm, then gate; else rmsnorm(y silu(z)) norm_weight.
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1).
        chunk_size: 16, 32, 64, 128 or 256; None lets the backend choose.
        recompute: do not keep the convolution's output for the backward pass.
        backend: "auto", "torch" or "triton".

    Returns:
        (batch, seqlen, nheads headdim) typed like projected, the input of the layer's last product.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "scan_layer"
    parameters = {
        "conv_weight": conv_weight, "conv_bias": conv_bias, "dt_bias": dt_bias, "A_log": A_log,
        "norm_weight": norm_weight, "D": D, "diagonal_weight": diagonal_weight, "initial_states": initial_states,
    }  # fmt: skip
    check_floating(op, projected=projected, **parameters)
    check_choice(op, "directions", directions, (1, 2))
    check_choice(op, "shift", shift, (True, False))
    check_choice(op, "norm_first", norm_first, (True, False))
    low, high = dt_limits
    if not low <= high:
        raise ValueError(f"{op}: dt_limits are {low} and {high}; the second must not be below the first")
    if projected.dim() != 3 or 0 in projected.shape:
        raise ValueError(f"{op}: projected has shape {tuple(projected.shape)}; expected (batch, seqlen, width), none 0")
    if min(nheads, ngroups, d_state) < 1 or nheads % ngroups or norm_weight.numel() % nheads:
        raise ValueError(
            f"{op}: nheads {nheads}, ngroups {ngroups}, d_state {d_state}, width {norm_weight.numel()}; nheads must be "
            "a divisor of the width and a multiple of ngroups"
        )
    form = LayerForm(nheads, norm_weight.numel() // nheads, ngroups, d_state, directions, shift, low, high)
    batch, seqlen, _ = projected.shape
    taps = conv_weight.shape[-1]
    if not 2 <= taps <= 9 or (directions == 2 and taps % 2 == 0):
        raise ValueError(f"{op}: conv_weight has {taps} taps; give 2 to 9, an odd number with two directions")
    if diagonal_weight is not None and D is None:
        raise ValueError(f"{op}: diagonal_weight is given without D; give zeros")
    if group_size is not None and (group_size < 1 or form.inner % group_size):
        raise ValueError(f"{op}: group_size is {group_size}; use a divisor of the width {form.inner}")
    heads = ((nheads,), (2, nheads))[:directions]
    shapes = {
        "conv_weight": ((form.conv_width, taps),), "conv_bias": ((form.conv_width,),), "dt_bias": heads,
        "A_log": (tuple(dt_bias.shape),), "norm_weight": ((form.inner,),), "D": ((nheads,),),
        "diagonal_weight": ((nheads, form.inner),), "initial_states": ((nheads, form.headdim, d_state),),
    }  # fmt: skip
    check_shape(op, "projected", projected, (batch, seqlen, sum(form.widths)))
    for name, expected in shapes.items():
        if parameters[name] is not None:
            check_shape(op, name, parameters[name], *expected)
    check_cu_seqlens(op, cu_seqlens, batch, seqlen, projected)
    check_chunk_size(op, chunk_size)
    check_finite(op, projected=projected, **parameters)
    why_not = no_kernel_for(d_state, form.headdim)
    check_backend(op, backend, projected, why_not)
    sizes = {"nheads": nheads, "ngroups": ngroups, "d_state": d_state, "directions": directions, "shift": shift}
    if why_not or not takes_triton(backend, projected):
        return scan_layer_torch(
            projected, conv_weight, conv_bias, dt_bias, A_log, norm_weight, D=D, diagonal_weight=diagonal_weight,
            initial_states=initial_states, dt_limits=dt_limits, eps=eps, group_size=group_size, norm_first=norm_first,
            cu_seqlens=cu_seqlens, chunk_size=chunk_size, **sizes,
        )  # fmt: skip
    if diagonal_weight is not None:
        diagonal_weight = diagonal_weight.to(projected.dtype)
    given = (conv_weight, conv_bias, dt_bias, A_log, D, diagonal_weight, initial_states)
    options = (cu_seqlens, *sizes.values(), float(low), None if high == math.inf else float(high), chunk_size)
    with torch.no_grad():
        y, mixed, product = torch.ops.matmix.layer_scan(projected, *given, *options, not recompute)
    kept = (None if recompute else mixed, None if recompute or diagonal_weight is None else product)
    return torch.ops.matmix.scan_layer(
        projected, y, *kept, *given, norm_weight, *options, float(eps), group_size, norm_first
    )


def _form(norm_width: int, nheads: int, *others) -> LayerForm:
    """From the options of the registered ops; others: groups, d_state, directions, shift, and the limits of steps."""
    *sizes, low, high = others
    return LayerForm(nheads, norm_width // nheads, *sizes, low, math.inf if high is None else high)


def _inner(conv_weight, ngroups: int, d_state: int, directions: int) -> int:
    """Channels of v."""
    channels = conv_weight.shape[0] if isinstance(conv_weight, Tensor) else conv_weight[0]
    return channels - 2 * directions * ngroups * d_state


@torch.library.custom_op("matmix::layer_scan", mutates_args=())
def _layer_scan(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    diagonal_weight: Tensor | None,
    initial_states: Tensor | None,
    cu_seqlens: Tensor | None,
    nheads: int,
    ngroups: int,
    d_state: int,
    directions: int,
    shift: bool,
    low: float,
    high: float | None,
    chunk_size: int | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    fused = triton_form("scan_layer")
    inner = _inner(conv_weight, ngroups, d_state, directions)
    form = _form(inner, nheads, ngroups, d_state, directions, shift, low, high)
    given = fused.Parameters(conv_weight, conv_bias, dt_bias, A_log, D, diagonal_weight, initial_states)
    y, mixed, product = fused.forward(projected, given, form, cu_seqlens, chunk_size)
    return y, *or_empty(projected, *((mixed, product) if keep else (None, None)))


@_layer_scan.register_fake
def _(projected, conv_weight, conv_bias, dt_bias, A_log, D, diagonal_weight, initial_states, cu_seqlens, *options):
    nheads, ngroups, d_state, directions, *_, keep = options
    inner = _inner(conv_weight, ngroups, d_state, directions)
    tokens = projected.shape[:2]
    mixed = projected.new_empty(*tokens, conv_weight.shape[0]) if keep else projected.new_empty(0)
    product = projected.new_empty(*tokens, nheads) if keep and diagonal_weight is not None else projected.new_empty(0)
    return projected.new_empty(*tokens, nheads, inner // nheads), mixed, product


@torch.library.custom_op("matmix::scan_layer", mutates_args=())
def _scan_layer(
    projected: Tensor,
    y: Tensor,
    mixed: Tensor | None,
    product: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    diagonal_weight: Tensor | None,
    initial_states: Tensor | None,
    norm_weight: Tensor,
    cu_seqlens: Tensor | None,
    nheads: int,
    ngroups: int,
    d_state: int,
    directions: int,
    shift: bool,
    low: float,
    high: float | None,
    chunk_size: int | None,
    eps: float,
    group_size: int | None,
    norm_first: bool,
) -> Tensor:
    form = _form(norm_weight.shape[0], nheads, ngroups, d_state, directions, shift, low, high)
    return triton_form("scan_layer").gate(projected, y, norm_weight, form, eps, group_size, norm_first)


@_scan_layer.register_fake
def _(projected, y, *args):
    return y.new_empty(*projected.shape[:2], y.shape[2] * y.shape[3])


@torch.library.custom_op("matmix::scan_layer_backward", mutates_args=())
def _scan_layer_backward(
    dout: Tensor,
    projected: Tensor,
    y: Tensor,
    mixed: Tensor | None,
    product: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    diagonal_weight: Tensor | None,
    initial_states: Tensor | None,
    norm_weight: Tensor,
    cu_seqlens: Tensor | None,
    nheads: int,
    ngroups: int,
    d_state: int,
    directions: int,
    shift: bool,
    low: float,
    high: float | None,
    chunk_size: int | None,
    eps: float,
    group_size: int | None,
    norm_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    fused = triton_form("scan_layer")
    form = _form(norm_weight.shape[0], nheads, ngroups, d_state, directions, shift, low, high)
    given = fused.Parameters(conv_weight, conv_bias, dt_bias, A_log, D, diagonal_weight, initial_states)
    found = fused.backward(
        dout, projected, y, mixed, product, given, norm_weight, form, cu_seqlens, chunk_size, eps, group_size,
        norm_first,
    )  # fmt: skip
    return or_empty(projected, *found)


@_scan_layer_backward.register_fake
def _(dout, projected, y, mixed, product, *args):
    like = (projected, *args[:8])
    return tuple(
        projected.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in like
    )


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:13])
    ctx.options = inputs[13:]


def _gradient(ctx, dout):
    saved = ctx.saved_tensors
    projected, *parameters = torch.ops.matmix.scan_layer_backward(dout, *saved, *ctx.options)
    found = map(none_if_absent, parameters, saved[4:12])
    return projected, None, None, None, *found, *[None] * (1 + len(ctx.options))


_scan_layer.register_autograd(_gradient, setup_context=_setup)


def _flops(
    projected, conv_weight, projects: bool, sizes: tuple, chunk_size: int | None, *, backward: bool, again: bool
) -> int:
    """Of convolution, product and scan of one pass; `again`: the first two are computed a second time."""
    nheads, ngroups, d_state, directions, shift = sizes
    inner = _inner(conv_weight, ngroups, d_state, directions)
    form = _form(inner, nheads, ngroups, d_state, directions, shift, 0.0, None)
    batch, seqlen, _ = projected
    before = 2 * batch * seqlen * (conv_weight[0] * conv_weight[1] + projects * inner * nheads)
    v, q = (batch, seqlen, nheads, form.headdim), (batch, seqlen, ngroups, d_state)
    scan = scan_flops(v, q, directions, form.scan, chunk_size, backward=backward)
    return scan + before * ((2 if backward else 1) + again)


@register_flop_formula(torch.ops.matmix.layer_scan)
def _(projected, conv_weight, *args, **kwargs) -> int:
    projects, sizes, chunk_size = args[4] is not None, args[7:12], args[14]
    return _flops(projected, conv_weight, projects, sizes, chunk_size, backward=False, again=False)


@register_flop_formula(torch.ops.matmix.scan_layer)
def _(projected, y, *args, **kwargs) -> int:
    return _FORWARD_FLOPS * math.prod(y)


@register_flop_formula(torch.ops.matmix.scan_layer_backward)
def _(dout, projected, y, mixed, product, conv_weight, *args, **kwargs) -> int:
    projects, sizes, chunk_size = args[4] is not None, args[8:13], args[15]
    rest = _flops(projected, conv_weight, projects, sizes, chunk_size, backward=True, again=mixed is None)
    return _BACKWARD_FLOPS * math.prod(y) + rest
