"""The layer around a scan as an op: checks, backend choice, registration with PyTorch.

Where it runs in Triton kernels, two registered ops are behind the function. `conv_and_scan` computes what stands before
the gate and has no gradient of its own; `scan_layer` takes its output, gates it, and has the backward pass of the
whole. So selective checkpointing can keep the output of the scan, by the name of its op, and compute the rest again.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from matmix.kernels.backend import check_backend, takes_triton
from matmix.kernels.checks import (
    check_choice,
    check_chunk_size,
    check_cu_seqlens,
    check_finite,
    check_floating,
    check_shape,
)
from matmix.kernels.context import Context, context_name
from matmix.kernels.functions import Operation, Output
from matmix.kernels.gated_norm.op import BACKWARD_FLOPS, FORWARD_FLOPS, gated_norm
from matmix.kernels.registration import register
from matmix.kernels.scan_layer.chunked import LayerForm, LayerInputs, LayerParts, LayerScan, compose_layer
from matmix.kernels.semiseparable.chunked.setup import scan_flops
from matmix.kernels.semiseparable.form import no_kernel
from matmix.kernels.semiseparable.op import quasiseparable_scan, semiseparable_scan
from matmix.kernels.short_conv.op import check_reach, short_conv


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
    combine: str = "add",
    D: Tensor | None = None,
    diagonal_weight: Tensor | Callable[[Tensor], Tensor] | None = None,
    initial_states: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_first: bool = True,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    recompute: bool = False,
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes all that stands between the two large products of a Hydra or Mamba-2 layer: convolution with SiLU, step
    sizes, scan, gate and norm.

    With [z | v k q (k q) | raw] the input: (v k q ..) = silu(conv(v k q ..)), dt = clamp(softplus(raw + dt_bias)),
    y = scan(v, q, k, -dt exp(A_log), input_scale=dt), and the output is rmsnorm(y) norm_weight silu(z). The scan is
    `semiseparable_scan` with one direction (Mamba-2, arXiv 2405.21060), whose convolution is causal, and
    `quasiseparable_scan` with two (Hydra, arXiv 2407.09941). On GPUs it runs as one operation in Triton kernels; on
    other devices, with combine other than "add", or where `diagonal_weight` is a function, as `short_conv`, the scan
    and `gated_norm` one after the other.

    Args:
        projected: (batch, seqlen, width), columns z and v of nheads headdim each, then k and q (ngroups d_state each)
            of the forward and, with two directions, of the backward direction, then nheads raw step sizes of each.
        conv_weight: (channels, taps) for all columns from v to the last q; 2 to 9 taps, an odd number of them with two
            directions.
        conv_bias: (channels,) or None.
        dt_bias, A_log: (nheads,), or with two directions also (2, nheads).
        norm_weight: (nheads headdim,), with combine="concat" (2 nheads headdim,).
        nheads, ngroups, d_state: heads; groups of heads that share k and q; size of a k or q.
        directions: 1 or 2.
        shift: each of two directions moves one token on in its own sense; see `quasiseparable_scan`.
        combine: "add", "mult" or "concat", how two directions meet; see `quasiseparable_scan`.
        D: (nheads,) or None: the weight of a token's own value.
        diagonal_weight: (nheads, nheads headdim) or None: it times a token's values is added to D. Or a layer, called
            with the values (batch, seqlen, nheads headdim), where that is more than its weight.
        initial_states: (nheads, headdim, d_state) or None: what all documents, in both directions, start from.
        dt_limits: the least and the largest step size.
        eps: added to the mean square.
        group_size: channels that share a root mean square, a divisor of their number; None for all of them.
        norm_first: norm, then gate; else rmsnorm(y silu(z)) norm_weight.
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1).
        chunk_size: 16, 32, 64, 128 or 256; None lets the backend choose.
        recompute: do not keep the convolution's output for the backward pass.
        context: the ranks that rows are cut over; see `semiseparable_scan`.
        backend: "auto", "torch" or "triton".

    Returns:
        (batch, seqlen, nheads headdim) typed like projected, the input of the layer's last product; with
        combine="concat" twice as wide, each head's forward half, then its backward half.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "scan_layer"
    product_weight = diagonal_weight if isinstance(diagonal_weight, Tensor) else None
    parameters = {
        "conv_weight": conv_weight, "conv_bias": conv_bias, "dt_bias": dt_bias, "A_log": A_log,
        "norm_weight": norm_weight, "D": D, "diagonal_weight": product_weight, "initial_states": initial_states,
    }  # fmt: skip
    check_floating(op, projected=projected, **parameters)
    check_choice(op, "directions", directions, (1, 2))
    check_choice(op, "shift", shift, (True, False))
    check_choice(op, "combine", combine, ("add", "mult", "concat")[: 3 if directions == 2 else 1])
    check_choice(op, "norm_first", norm_first, (True, False))
    low, high = dt_limits
    if not low <= high:
        raise ValueError(f"{op}: dt_limits are {low} and {high}; the second must not be below the first")
    if projected.dim() != 3 or 0 in projected.shape:
        raise ValueError(f"{op}: projected has shape {tuple(projected.shape)}; expected (batch, seqlen, width), none 0")
    width, halves = norm_weight.numel(), 2 if combine == "concat" else 1
    if min(nheads, ngroups, d_state) < 1 or nheads % ngroups or width % (halves * nheads):
        raise ValueError(
            f"{op}: nheads {nheads}, ngroups {ngroups}, d_state {d_state}, width {width}; nheads must be a divisor of "
            "the width and a multiple of ngroups"
        )
    form = LayerForm(nheads, width // halves // nheads, ngroups, d_state, directions, shift, low, high)
    batch, seqlen, _ = projected.shape
    taps = conv_weight.shape[-1]
    if not 2 <= taps <= 9 or (directions == 2 and taps % 2 == 0):
        raise ValueError(f"{op}: conv_weight has {taps} taps; give 2 to 9, an odd number with two directions")
    if diagonal_weight is not None and D is None:
        raise ValueError(f"{op}: diagonal_weight is given without D; give zeros")
    if group_size is not None and (group_size < 1 or width % group_size):
        raise ValueError(f"{op}: group_size is {group_size}; use a divisor of the width {width}")
    heads = ((nheads,), (2, nheads))[:directions]
    shapes = {
        "conv_weight": ((form.conv_width, taps),), "conv_bias": ((form.conv_width,),), "dt_bias": heads,
        "A_log": (tuple(dt_bias.shape),), "norm_weight": ((width,),), "D": ((nheads,),),
        "diagonal_weight": ((nheads, form.inner),), "initial_states": ((nheads, form.headdim, d_state),),
    }  # fmt: skip
    check_shape(op, "projected", projected, (batch, seqlen, sum(form.widths)))
    for name, expected in shapes.items():
        if parameters[name] is not None:
            check_shape(op, name, parameters[name], *expected)
    check_cu_seqlens(op, cu_seqlens, batch, seqlen, projected, part=context is not None)
    if context is not None:
        check_reach(op, seqlen, taps)
    check_chunk_size(op, chunk_size)
    check_finite(op, projected=projected, **parameters)
    why_not = no_kernel(d_state, form.headdim)
    check_backend(op, backend, projected, why_not)
    one_operation = combine == "add" and (diagonal_weight is None or product_weight is not None) and not why_not
    given = LayerInputs.of(
        projected, conv_weight, conv_bias, dt_bias, A_log, norm_weight, nheads, ngroups, d_state, directions, shift, D,
        diagonal_weight, initial_states, dt_limits=dt_limits, eps=float(eps), group_size=group_size,
        norm_first=norm_first, cu_seqlens=cu_seqlens, chunk_size=chunk_size, keep=not recompute,
        context=context_name(context),
    )  # fmt: skip
    if not one_operation or not takes_triton(backend, projected):
        parts = LayerParts(*(partial(part, backend=backend) for part in _PARTS))
        return compose_layer(parts, given, combine, context)
    if product_weight is not None:
        given = given._replace(diagonal_weight=product_weight.to(projected.dtype))
    with torch.no_grad():
        y, mixed, product = _conv_and_scan(given)
    given = given._replace(scanned=y)
    if not recompute:
        given = given._replace(mixed=mixed, product=None if product_weight is None else product)
    return _scan_layer(given).y


_PARTS = LayerParts(short_conv, semiseparable_scan, quasiseparable_scan, gated_norm)


def _scan_like(given: LayerInputs, _: bool) -> LayerScan:
    tokens, form = given.projected.shape[:2], given.form
    mixed = product = None
    if given.keep:
        mixed = given.projected.new_empty(*tokens, form.conv_width)
        product = None if given.diagonal_weight is None else given.projected.new_empty(*tokens, form.heads)
    return LayerScan(given.projected.new_empty(*tokens, form.heads, form.headdim), mixed, product)


def _scan_flops(given: LayerInputs, *, backward: bool, again: bool = False) -> int:
    """Counts convolution, product and scan of one pass; `again`: the first two are computed a second time."""
    form = given.form_of(given.norm_weight[0])
    batch, seqlen, _ = given.projected
    products = math.prod(given.conv_weight) + (given.diagonal_weight is not None) * form.inner * given.nheads
    v, q = (batch, seqlen, given.nheads, form.headdim), (batch, seqlen, given.ngroups, given.d_state)
    scan = scan_flops(v, q, given.directions, form.scan, given.chunk_size, backward=backward)
    return scan + 2 * batch * seqlen * products * ((2 if backward else 1) + again)


def _flops(given: LayerInputs, *, backward: bool) -> int:
    if not backward:
        return FORWARD_FLOPS * math.prod(given.scanned)
    return BACKWARD_FLOPS * math.prod(given.scanned) + _scan_flops(given, backward=True, again=given.mixed is None)


_conv_and_scan = register(
    Operation("conv_and_scan", LayerInputs, LayerScan, backward=None), "scan_layer.fused", _scan_like,
    flops=_scan_flops, suffix="_scan", listed=False,
)  # fmt: skip
_scan_layer = register(
    Operation("scan_layer", LayerInputs, Output, without_gradient=("scanned", "mixed", "product")), "scan_layer.fused",
    lambda given, _: given.scanned.new_empty(*given.projected.shape[:2], given.form.inner), flops=_flops,
)  # fmt: skip
