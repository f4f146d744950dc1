"""The layer in PyTorch, on any device: one operation after the other, each with its own backward pass.

Between the operations stand two functions with hand-written gradients, which save memory: for the backward pass they
keep only views of tensors that other operations keep anyway. PyTorch's own autograd of the same lines keeps four
float32 tensors per head and token, and in the backward pass allocates two more tensors of the inner width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.context import Context
from matmix.kernels.functions import Function, working, working_dtype
from matmix.kernels.gated_norm.chunked import gated_norm_torch
from matmix.kernels.semiseparable.chunked import quasiseparable_chunked, semiseparable_chunked
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.short_conv.chunked import short_conv_torch


class LayerForm(NamedTuple):
    """The sizes and options of a layer around a scan: in_proj's output is [z | v, k and q of each direction | raw step
    sizes of each direction]."""

    heads: int
    headdim: int
    groups: int
    d_state: int
    directions: int
    """1: causal, with a causal convolution; 2: bidirectional, with a centred one."""
    shift: bool
    """Two directions: each one's output moves one token on in its own sense."""
    low: float
    """Step sizes are never below this."""
    high: float
    """Step sizes are never above this."""

    @property
    def inner(self) -> int:
        """Channels of z and of v."""
        return self.heads * self.headdim

    @property
    def group_width(self) -> int:
        """Channels of one k or q."""
        return self.groups * self.d_state

    @property
    def conv_width(self) -> int:
        """Channels that the convolution takes."""
        return self.inner + 2 * self.directions * self.group_width

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of z, of what the convolution takes, and of the step sizes."""
        return self.inner, self.conv_width, self.directions * self.heads

    @property
    def scan(self) -> ScanForm:
        return ScanForm(shift=self.shift and self.directions == 2)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns z (..., inner), the convolution's channels and the raw step sizes (..., directions nheads), views."""
        z, channels, raw = projected.split(self.widths, -1)
        return z, channels, raw

    def values_and_vectors(self, mixed: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns v (..., H, P), and q and k (..., groups, d_state) of each direction, views of the convolution's
        output (..., conv_width)."""
        return self.by_head(mixed.split([self.inner, *2 * self.directions * [self.group_width]], -1))

    def by_head(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The same from the parts of the convolution's output, v and k and q of each direction."""
        v, *vectors = parts
        k, q = ([x.unflatten(-1, (self.groups, self.d_state)) for x in vectors[i::2]] for i in (0, 1))
        return v.unflatten(-1, (self.heads, self.headdim)), q, k

    def sides(
        self, q: list[Tensor], k: list[Tensor], dt: Tensor, log_decay: Tensor, state: Tensor | None = None
    ) -> tuple[ScanSide, ...]:
        """Returns the directions of the scan, for dt and log_decay (..., directions, H)."""
        return tuple(
            ScanSide(q[i], k[i], log_decay[..., i, :], dt[..., i, :], state, i == 1) for i in range(self.directions)
        )

    def scan_states(self, initial_states: Tensor | None, documents: int) -> Tensor | None:
        """Returns the state (documents, H, N, P) that both directions start from, of the parameter (H, P, N)."""
        if initial_states is None:
            return None
        return initial_states.transpose(1, 2).expand(documents, -1, -1, -1)


class LayerInputs(NamedTuple):
    """The arguments of `scan_layer`, of matmix::conv_and_scan, and of matmix::scan_layer, which takes the results of
    that too. Both operations run in Triton only."""

    projected: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    norm_weight: Tensor
    nheads: int
    ngroups: int
    d_state: int
    directions: int = 2
    shift: bool = True
    D: Tensor | None = None
    diagonal_weight: Tensor | None = None
    """Typed like the projection; in PyTorch also a function."""
    initial_states: Tensor | None = None
    low: float = 0.0
    high: float | None = None
    eps: float = 1e-5
    group_size: int | None = None
    norm_first: bool = True
    cu_seqlens: Tensor | None = None
    chunk_size: int | None = None
    scanned: Tensor | None = None
    """The scan's output. It has no gradient; what it is made of has."""
    mixed: Tensor | None = None
    """The convolution's output, or None to compute it again for the backward pass."""
    product: Tensor | None = None
    keep: bool = True
    """Whether conv_and_scan returns what the backward pass would have to compute again."""
    context: str = ""
    """The name of the context whose ranks hold parts of the rows; "" for whole rows. Of the Triton form."""

    @classmethod
    def of(
        cls, *tensors: Tensor | None, dt_limits: tuple[float, float] = (0.0, math.inf), **options: Any
    ) -> LayerInputs:
        """From the arguments of `scan_layer`."""
        low, high = dt_limits
        return cls(*tensors, low=float(low), high=None if high == math.inf else float(high), **options)

    @property
    def form(self) -> LayerForm:
        return self.form_of(self.norm_weight.shape[0])

    def form_of(self, inner: int) -> LayerForm:
        """The layer's form, given its width."""
        high = math.inf if self.high is None else self.high
        headdim = inner // self.nheads
        return LayerForm(self.nheads, headdim, self.ngroups, self.d_state, self.directions, self.shift, self.low, high)


class LayerScan(NamedTuple):
    """The results of matmix::conv_and_scan, typed like the projection."""

    y: Tensor
    """(batch, seqlen, nheads, headdim)"""
    mixed: Tensor | None
    """The convolution's output (batch, seqlen, conv width)."""
    product: Tensor | None
    """Its values times `diagonal_weight`, (batch, seqlen, nheads)."""


def free_step_sizes(raw: Tensor, dt_bias: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """Returns biased raw step sizes (..., directions, nheads) and their softplus, in float32 at least: bfloat16 would
    round the decay of long memories to 1."""
    biased = working(raw).unflatten(-1, (directions, -1)) + dt_bias.to(working_dtype(raw))
    return biased, F.softplus(biased)


class StepSizes(Function):
    """dt = clamp(softplus(raw + dt_bias)) and the log decay -dt exp(A_log); keeps its inputs only."""

    @staticmethod
    def forward(
        raw: Tensor, dt_bias: Tensor, A_log: Tensor, directions: int, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        """raw (..., directions nheads), one direction after the other; dt_bias and A_log (nheads,) or (directions,
        nheads). Returns dt and the log decay, both (..., directions, nheads)."""
        _, dt = free_step_sizes(raw, dt_bias, directions)
        if low > 0 or high < math.inf:
            dt = dt.clamp(low, high)
        return dt, dt * -A_log.to(dt.dtype).exp()

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        raw, dt_bias, A_log, *ctx.options = inputs
        ctx.save_for_backward(raw, dt_bias, A_log)

    @staticmethod
    def backward(ctx, ddt: Tensor, ddecay: Tensor) -> tuple[Tensor | None, ...]:
        raw, dt_bias, A_log = ctx.saved_tensors
        directions, low, high = ctx.options
        biased, free = free_step_sizes(raw, dt_bias, directions)
        A = -A_log.to(free.dtype).exp()
        gradient = torch.addcmul(ddt, ddecay, A) * torch.sigmoid(biased)
        dt = free
        if low > 0 or high < math.inf:
            gradient = gradient.masked_fill((free < low) | (free > high), 0)
            dt = free.clamp(low, high)
        sums = tuple(range(free.dim() - dt_bias.dim()))
        dA_log = (ddecay * dt).sum(sums) * A
        dbias = gradient.sum(sums).to(dt_bias.dtype)
        return gradient.flatten(-2).to(raw.dtype), dbias, dA_log.to(A_log.dtype), None, None, None


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a linear layer's output for x, which autocast may lower."""
    device = x.device.type
    if x.is_meta:  # no autocast there
        return x.dtype
    lowered = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lowered else x.dtype


class ValuesAndVectors(Function):
    """Splits the convolution's output and computes the diagonal v weight^T + D from its first part.

    The gradients of the parts and of the diagonal meet in one buffer, which the product with `weight` adds to in place.
    """

    @staticmethod
    def forward(mixed: Tensor, weight: Tensor, D: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """mixed (..., sum of sizes); weight (nheads, sizes[0]); D (nheads,). Returns the parts (..., size), and the
        diagonal (..., nheads) in float32 at least."""
        parts = mixed.split(sizes, -1)
        diagonal = F.linear(parts[0], weight)
        return *parts, working(diagonal) + D.to(working_dtype(diagonal))

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        mixed, weight, D, _ = inputs
        ctx.save_for_backward(mixed, weight)
        ctx.product, ctx.typed = product_dtype(mixed), D.dtype

    @staticmethod
    def backward(ctx, dv: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        mixed, weight = ctx.saved_tensors
        *dvectors, ddiagonal = rest
        wide = weight.shape[1]
        dD = ddiagonal.flatten(0, -2).sum(0).to(ctx.typed)
        factor = ddiagonal.to(ctx.product).flatten(0, -2)
        v = mixed[..., :wide].to(ctx.product).flatten(0, -2)
        dweight = (factor.t() @ v).to(weight.dtype)
        dmixed = torch.cat([dv, *dvectors], -1)
        rows = dmixed.flatten(0, -2)[:, :wide]
        rows.addmm_(factor.to(rows.dtype), weight.to(rows.dtype))
        return dmixed, dweight, dD, None


class ScanArguments(NamedTuple):
    """The arguments of a layer's scan, (batch, seqlen, ...) or of one token (batch, ...)."""

    v: Tensor
    sides: tuple[ScanSide, ...]
    """One for each direction, in the order of tokens."""
    diagonal: Tensor | None
    """(nheads,) or one for each token (..., nheads)."""


def scan_arguments(
    form: LayerForm,
    mixed: Tensor,
    raw: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor | None = None,
    diagonal_weight: Tensor | Callable[[Tensor], Tensor] | None = None,
    state: Tensor | None = None,
) -> ScanArguments:
    """Makes the arguments of the scan from the convolution's output (..., conv_width) and the raw step sizes
    (..., directions nheads); the parameters as in `scan_layer`. state: what all directions start from."""
    sizes = (form.inner, *2 * form.directions * [form.group_width])
    if isinstance(diagonal_weight, Tensor):
        assert D is not None
        *parts, diagonal = ValuesAndVectors.apply(mixed, diagonal_weight, D, sizes)
    else:
        parts, diagonal = mixed.split(sizes, -1), D
        if diagonal_weight is not None:
            assert D is not None
            diagonal = diagonal_weight(parts[0])
            diagonal = working(diagonal) + D.to(working_dtype(diagonal))
    v, q, k = form.by_head(tuple(parts))
    dt, log_decay = StepSizes.apply(raw, dt_bias, A_log, form.directions, form.low, form.high)
    return ScanArguments(v, form.sides(q, k, dt, log_decay, state), diagonal)


def norm_and_gate(
    norm: Callable,
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int | None = None,
    norm_first: bool = True,
) -> Tensor:
    """Returns rmsnorm(y) weight silu(z) by the operation `norm`, or without `norm_first` rmsnorm(y silu(z)) weight; all
    (..., width), the weight (width,)."""
    if norm_first:
        return norm(y, weight, z, eps=eps, group_size=group_size)
    gated = (working(y) * F.silu(z.to(working_dtype(y)))).unflatten(-1, (-1, group_size or y.shape[-1]))
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return ((gated * scale).flatten(-2) * weight).to(y.dtype)


class LayerParts(NamedTuple):
    """The operations that a layer is made of."""

    conv: Callable
    causal_scan: Callable
    two_sided_scan: Callable
    norm: Callable


def compose_layer(
    parts: LayerParts, given: LayerInputs, combine: str = "add", context: Context | None = None
) -> Tensor:
    """`scan_layer` by these operations, one after the other; see there."""
    form = given.form_of(given.norm_weight.shape[0] // (2 if combine == "concat" else 1))
    z, channels, raw = form.split(given.projected)
    causal, cu_seqlens = given.directions == 1, given.cu_seqlens
    rows = {"cu_seqlens": cu_seqlens, "context": context}
    mixed = parts.conv(channels, given.conv_weight, given.conv_bias, causal=causal, activation="silu", **rows)
    documents = z.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    state = form.scan_states(given.initial_states, documents)
    v, sides, diagonal = scan_arguments(
        form, mixed, raw, given.dt_bias, given.A_log, given.D, given.diagonal_weight, state
    )
    first, second = sides[0], sides[-1]
    options = {"diagonal": diagonal, "chunk_size": given.chunk_size, **rows}
    if causal:
        y = parts.causal_scan(
            v, first.q, first.k, first.log_decay, input_scale=first.input_scale, initial_state=state, **options
        )
    else:
        y = parts.two_sided_scan(
            v, first.q, first.k, second.q, second.k, first.log_decay, second.log_decay,
            input_scale_forward=first.input_scale, input_scale_backward=second.input_scale, shift=given.shift,
            initial_state_forward=state, initial_state_backward=state, combine=combine, **options,
        )  # fmt: skip
    if combine == "concat":
        z = both_halves(z, given.nheads)
    y = y.flatten(-2).to(z.dtype)
    return norm_and_gate(parts.norm, y, z, given.norm_weight, given.eps, given.group_size, given.norm_first)


def both_halves(z: Tensor, nheads: int) -> Tensor:
    """Returns the gate of two scans side by side, each head's channels of z (..., inner) twice: (..., 2 inner)."""
    return z.unflatten(-1, (nheads, -1)).repeat(*[1] * z.dim(), 2).flatten(-2)


def scan_layer_torch(
    *tensors: Tensor | None,
    combine: str = "add",
    recompute: bool = False,
    context: Context | None = None,
    **options: Any,
) -> Tensor:
    """`scan_layer` in PyTorch, without argument checks; see there. `recompute` changes nothing here."""
    parts = LayerParts(short_conv_torch, semiseparable_chunked, quasiseparable_chunked, gated_norm_torch)
    return compose_layer(parts, LayerInputs.of(*tensors, **options), combine, context)
