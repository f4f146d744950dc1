"""The block that the matrix mixers share (arXiv 2407.09941, section 3). Everything except the matrix is the same for
all of them, so that a comparison of them compares matrices.

Parameters have the names and shapes of the authors' module; those of the matrix are below `matrix_mixer`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import short_conv
from matmix.kernels.context import Context
from matmix.kernels.functions import outside_autocast, working
from matmix.model.calls import weights_of
from matmix.model.initialization import InitRule
from matmix.model.mixers.base import Mixer, RMSNormWeight, ShortConv, conv_weights, gated, recomputed
from matmix.model.mixers.whole_documents import documents_over_heads

Entries = Callable[[Tensor, Tensor, int], Tensor]
"""(q (B, R, H, d), k (B, L, H, d), position of the first of the R rows) -> rows of the matrix (B, H, R, L)."""

BLOCK_NUMBERS = 1 << 22
"""Terms, one for each pair of tokens, head and channel, that are in memory at a time. On a CPU four times as many,
which its caches do not hold, took 2.8 times as long (cauchy_dd, 512 tokens); elsewhere 16 times as many are taken."""


@outside_autocast
def mix_in_row_blocks(entries: Entries, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """M v in float32 at least, for q and k (B or 1, L, H, d) and v (B, L, H, P).

    The terms of all pairs at once would need d times the memory of M; not even M is kept: the backward pass computes
    each block again.
    """
    v = working(v)
    q, k = q.to(v.dtype), k.to(v.dtype)
    numbers = BLOCK_NUMBERS if q.device.type == "cpu" else 16 * BLOCK_NUMBERS
    rows = max(1, numbers // (q.shape[0] * k.shape[1] * q.shape[2] * q.shape[3]))
    starts = range(0, q.shape[1], rows)
    return torch.cat([recomputed(mix_rows, entries, q[:, at : at + rows], k, v, at) for at in starts], 1)


def mix_rows(entries: Entries, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """The rows of M v from `first` on, as many as q has."""
    return torch.einsum("bhts,bshp->bthp", entries(q, k, first), v)


WIDEST_SHORT_CONV = 9
"""Taps of the widest convolution that the op knows, which respects document boundaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBlockConfig:
    """Options of the block around the matrix."""

    headdim: int = 64
    """Channels per head; every head has a matrix of its own."""
    expand: int = 2
    """Inner width over d_model."""
    d_conv: int = 7
    """Width of the centred depthwise convolution (odd); from 3 to 9 it is fast and takes packed documents at once."""
    bias: bool = False
    """Biases in the input and output projections."""
    conv_bias: bool = True
    """Bias in the convolution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryKeyConfig(SharedBlockConfig):
    """Options of a matrix whose entries come from a query and a key each."""

    qk_dim: int = 16
    """Channels of queries and keys per head."""


class MixingParameters(nn.Module):
    """Holds the parameters of a matrix."""

    def __init__(self, parameters: dict[str, tuple[tuple[int, ...], InitRule]]):
        super().__init__()
        for name, (shape, _) in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.init_rules = {name: rule for name, (_, rule) in parameters.items()}


class MatrixMixer(Mixer):
    """in_proj -> [z | v | inputs of the matrix] -> conv + silu -> M v + v -> gated norm -> out_proj.

    A subclass gives `input_widths` and `mixing_parameters`, what M is made of; `entries`, M by its formula; and
    `mix_values`, M v by a fast algorithm.
    """

    Config = SharedBlockConfig
    bidirectional_form = True
    data_dependent = False
    sequence_aligned = False
    holds_identity = True
    activated_inputs: ClassVar[bool] = True
    """SiLU follows the convolution of the inputs too, as it does for v."""
    knows_documents: ClassVar[bool] = False
    """`mix_values` takes packed documents, and parts of rows."""

    def __init__(self, d_model: int, config: Any, **options):
        super().__init__(d_model, config, **options)
        self.d_inner, self.nheads = self.inner_width(d_model, config)
        self.input_sizes = self.input_widths(self.nheads, config)
        self.direct = self.direct_numbers(config) * self.nheads
        self.conv_dim = self.d_inner + sum(self.input_sizes)
        self.in_proj = nn.Linear(d_model, self.d_inner + self.conv_dim + self.direct, bias=config.bias)
        self.conv1d = ShortConv(self.conv_dim, config.d_conv, config.conv_bias)
        self.norm = RMSNormWeight(self.d_inner)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.bias)
        if parameters := self.mixing_parameters():
            self.matrix_mixer = MixingParameters(parameters)

    def blocks(self) -> dict[str, tuple[int, ...]]:
        direct = self.direct_numbers(self.config) * (self.nheads,)
        rows = (self.d_inner, self.d_inner, *self.input_sizes, *direct)
        # What M is made of has a row for each head or position.
        entries = {f"matrix_mixer.{name}": () for name in self.mixing_parameters()}
        return {"in_proj.weight": rows, **entries}

    # What a subclass says about its matrix.

    @classmethod
    def input_widths(cls, nheads: int, config: Any) -> tuple[int, ...]:
        """Widths of the inputs of the matrix, which are projected from x and convolved."""
        return ()

    @classmethod
    def direct_numbers(cls, config: Any) -> int:
        """How many numbers the matrix takes for each head from in_proj without convolution and activation."""
        return 0

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        """Shapes and initial values of the parameters of the matrix, in the module `matrix_mixer`."""
        return {}

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        """M (B or 1, H, L, L) without the skip, for v (B, L, H, P) and inputs (B, L, width) each."""
        raise NotImplementedError

    def mix_values(
        self, v: Tensor, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """M v (B, L, H, P) without the skip, in any floating dtype."""
        raise NotImplementedError

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: Any, seqlen: int) -> float:
        """Operations of `mix_values` for one token."""
        raise NotImplementedError

    # The block.

    @staticmethod
    def inner_width(d_model: int, config: Any) -> tuple[int, int]:
        """d_inner and the number of heads."""
        return config.expand * d_model, config.expand * d_model // config.headdim

    @classmethod
    def check(cls, d_model: int, config: Any) -> None:
        super().check(d_model, config)
        cls.require_least(config, qk_dim=1, d_state=1)
        cls.require_inner_width(d_model, config)
        cls.require(config.d_conv >= 1 and config.d_conv % 2 == 1, config, "d_conv", "must be odd and at least 1")

    @classmethod
    def why_no_context(cls, config: Any, causal: bool) -> str:
        if cls.fixed_length:
            return super().why_no_context(config, causal)
        if config.d_conv > WIDEST_SHORT_CONV:
            return f"convolves {config.d_conv} taps (d_conv), more than {WIDEST_SHORT_CONV}"
        return ""

    @classmethod
    def mixing_flops(cls, d_model: int, config: Any, seqlen: int, causal: bool) -> float:
        return cls.matrix_flops(*cls.inner_width(d_model, config), config, seqlen)

    def parts(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The gate z (B, L, d_inner), v (B, L, H, P) and the inputs of the matrix (B, L, width) each; the
        `direct_numbers` are the last of them, the first for all heads, then the second, and so on."""
        z, mixed, direct = self.in_proj(x).split([self.d_inner, self.conv_dim, self.direct], -1)
        weight, bias = conv_weights(self.conv1d)
        if self.activated_inputs or not self.input_sizes:
            mixed = centred_conv(mixed, weight, bias, "silu", cu_seqlens, self.context)
            v, *inputs = mixed.split([self.d_inner, *self.input_sizes], -1)
        else:
            # Two convolutions rather than an activation of its own: v would be rounded twice in bfloat16.
            sizes = [self.d_inner, self.conv_dim - self.d_inner]
            (v, linear), weights = mixed.split(sizes, -1), weight.split(sizes)
            biases = (None, None) if bias is None else bias.split(sizes)
            v = centred_conv(v, weights[0], biases[0], "silu", cu_seqlens, self.context)
            inputs = centred_conv(linear, weights[1], biases[1], None, cu_seqlens, self.context)
            inputs = inputs.split(self.input_sizes, -1)
        direct = (direct,) if self.direct else ()
        return z, v.unflatten(-1, (self.nheads, -1)), (*inputs, *direct)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        whole = self.context is None
        if whole and cu_seqlens is not None and not (self.knows_documents and self.config.d_conv <= WIDEST_SHORT_CONV):
            return self.forward_by_document(x, cu_seqlens)
        z, v, inputs = self.parts(x, cu_seqlens)
        if whole or self.knows_documents:
            return self.finish(self.mixed(v, inputs, cu_seqlens, max_seqlen), z)

        def mixed(v: Tensor, *heads: Tensor) -> Tensor:
            return self.mixed(v, tuple(part.flatten(-2) for part in heads))

        heads = (part.unflatten(-1, (self.nheads, -1)) for part in inputs)
        return self.finish(documents_over_heads(mixed, self.context, cu_seqlens, v, *heads), z)

    def mixed(self, v: Tensor, inputs: tuple[Tensor, ...], *documents: Any) -> Tensor:
        """`mix_values`, with the skip."""
        y = self.mix_values(v, inputs, *documents)
        return y + v if self.holds_identity else y

    def finish(self, y: Tensor, z: Tensor) -> Tensor:
        """Gated norm and output projection of y (B, L, H, P)."""
        return self.out_proj(gated(y.flatten(-2), z, self.norm))

    def matrix(self, x: Tensor) -> Tensor:
        if self.fixed_length:
            self.check_input(x)
        _, v, inputs = self.parts(x, None)
        m = self.entries(v, inputs)
        return m + torch.eye(x.shape[1], dtype=m.dtype, device=m.device) if self.holds_identity else m

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x, None)[1]

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed, self.parts(x, None)[0])


class QueryKeyMixer(MatrixMixer):
    """M from a query and a key for every token and head: projected from x, or parameters."""

    Config = QueryKeyConfig

    @classmethod
    def input_widths(cls, nheads: int, config: QueryKeyConfig) -> tuple[int, ...]:
        return (nheads * config.qk_dim,) * 2 if cls.data_dependent else ()

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        shape = (self.max_seqlen, self.nheads, self.config.qk_dim)
        return {} if self.data_dependent else dict.fromkeys(("q_matrix", "k_matrix"), (shape, draw_xavier_normal))

    def scale(self) -> float:
        """The factor of all entries."""
        return (self.max_seqlen * self.config.qk_dim) ** -0.5

    def queries_and_keys(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """q and k, (B, L, H, qk_dim) or (1, L, H, qk_dim)."""
        if self.data_dependent:
            q, k = (part.unflatten(-1, (-1, self.config.qk_dim)) for part in inputs)
            return q, k
        q, k = weights_of(self.matrix_mixer, "q_matrix", "k_matrix")
        return q.unsqueeze(0), k.unsqueeze(0)


def centred_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    context: Context | None,
) -> Tensor:
    """`short_conv`, also of 1 tap and, for rows of one document each, of more than it takes."""
    width = weight.shape[-1]
    if 1 < width <= WIDEST_SHORT_CONV:
        return short_conv(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens, context=context)
    assert width == 1 or (cu_seqlens is None and context is None)
    return plain_conv(x, weight, bias, activation)


@outside_autocast
def plain_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Does what `short_conv` does, on a whole row and with any odd number of taps, in float32 at least."""
    wide, (channels, width) = working(x), weight.shape
    bias = None if bias is None else bias.to(wide.dtype)
    y = F.conv1d(wide.mT, weight.unsqueeze(1).to(wide.dtype), bias, padding=width // 2, groups=channels).mT
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def draw_xavier_normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Glorot's normal values, fans as PyTorch takes them for (outputs, inputs, ...): M starts small, near the skip."""
    fans = (shape[0] + shape[1]) * math.prod(shape[2:])
    return torch.randn(shape, generator=generator) * math.sqrt(2 / fans)
