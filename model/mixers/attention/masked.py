"""Structured masked attention: Y = (L * Q K^T) V for a structured mask L (arXiv 2405.21060, section 4).

The one contraction can be taken in two orders, which agree: quadratic, with Q K^T made first, or linear, with K and V
contracted first and L applied along the sequence by its own fast algorithm: a scan for causal masks with decays, FFTs
for Toeplitz and Fourier masks, sums along the lines of a grid or the levels of a tree. As in RetNet (arXiv 2307.08621)
an RMS norm per head follows, since rows of L have sums that grow with the length.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import semiseparable_scan
from matmix.kernels.functions import working
from matmix.model.calls import weight_of
from matmix.model.mixers.base import (
    ExactLinear,
    HeadsConfig,
    Mixer,
    RMSNormWeight,
    exact_linear,
    gate_sums,
    head_count,
    recomputed,
    scan_on,
    zero_state,
)
from matmix.model.mixers.convolutions.long import cosine_transform
from matmix.model.mixers.whole_documents import documents_over_heads

STATE_BLOCK = 4
"""State channels that a product with L takes at a time: it works on `STATE_BLOCK` times as much as there are values."""


def fourier_mask(length: int, like: Tensor) -> Tensor:
    """L[i, j] = cos(2 pi i j / L), (1, 1, L, L), in float32 at least."""
    position = torch.arange(length, device=like.device)
    # Whole turns are taken off while the numbers are whole: i j is soon beyond what float32 can count.
    turns = torch.outer(position, position).remainder(length)
    turns = turns.to(torch.promote_types(like.dtype, torch.float32)) / length
    return (2 * math.pi * turns).cos()[None, None]


def toeplitz_spectrum(alpha: Tensor, length: int) -> Tensor:
    """The spectrum of `toeplitz_mask_product`: the transform of the circulant matrix that L is a corner of."""
    points, middle, alpha = transform_length(length), alpha.shape[-1] // 2, working(alpha)
    gap = alpha.new_zeros(alpha.shape[0], points - (2 * length - 1))
    circle = torch.cat([alpha[:, middle : middle + length], gap, alpha[:, middle - length + 1 : middle]], -1)
    return torch.fft.rfft(circle)


def toeplitz_mask_product(x: Tensor, spectrum: Tensor) -> Tensor:
    """L x for x (B, H, ..., L) and a spectrum (H, points / 2 + 1)."""
    points, length = 2 * (spectrum.shape[-1] - 1), x.shape[-1]
    spectrum = spectrum.view(1, spectrum.shape[0], *[1] * (x.dim() - 3), -1)
    return torch.fft.irfft(torch.fft.rfft(x, points) * spectrum, points)[..., :length]


def transform_length(length: int) -> int:
    """The least power of two in which a Toeplitz product of this length does not wrap round."""
    return max(2, 1 << (2 * length - 2).bit_length())


def associative_scan(x: Tensor, gates: Tensor) -> Tensor:
    """L x for a 1-semiseparable L, y_t = gates_t y_(t-1) + x_t, by the associative scan of S5 (arXiv 2208.04933) and
    Mamba: neighbours are joined, half as many are scanned, and those between are made of them. O(L) operations in
    O(log L) steps. x (..., L), gates (..., L) that broadcast."""
    half = x.shape[-1] // 2
    if half == 0:
        return x
    (first, second), (gate, other) = ((part[..., ::2], part[..., 1::2]) for part in (x, gates))
    ends = associative_scan(second + other * first[..., :half], other * gate[..., :half])
    starts = first + gate * F.pad(ends, (1, 0))[..., : first.shape[-1]]
    y = torch.stack((starts[..., :half], ends), -1).flatten(-2)
    return torch.cat((y, starts[..., half:]), -1)


def path_product(x: Tensor, decay: Tensor) -> Tensor:
    """L x for L[i, j] = decay^abs(i - j), x (..., L) and decay (..., 1)."""
    gates = decay.expand(*decay.shape[:-1], x.shape[-1])
    return associative_scan(x, gates) + associative_scan(x.flip(-1), gates).flip(-1) - x


def grid_product(x: Tensor, decay: Tensor, columns: int) -> Tensor:
    """L x for L[i, j] = decay^(edges between i and j) in a grid whose nodes are counted row by row: the product of a
    mask of rows and one of columns. x (..., L), decay (..., 1); the last row may be shorter, which adds no detours."""
    columns = min(columns, x.shape[-1])
    grid = F.pad(x, (0, -x.shape[-1] % columns)).unflatten(-1, (-1, columns))
    for _ in range(2):
        grid = path_product(grid, decay.unsqueeze(-1)).mT
    return grid.flatten(-2)[..., : x.shape[-1]]


def tree_levels(length: int, branches: int) -> list[int]:
    """How many nodes each level has of a tree of `length` nodes that is filled level by level."""
    levels = []
    while (left := length - sum(levels)) > 0:
        levels.append(min(left, branches ** len(levels)))
    return levels


def tree_product(x: Tensor, decay: Tensor, branches: int) -> Tensor:
    """L x for L[i, j] = decay^(edges between i and j) in the tree where i > 0 hangs from (i - 1) // branches: sums of
    what hangs below go up level by level, then those of all else come down. x (..., L), decay (..., 1)."""
    branches = min(branches, x.shape[-1])
    sizes = tree_levels(x.shape[-1], branches)
    levels = list(x.split(sizes, -1))
    for level in range(len(sizes) - 1, 0, -1):
        below = F.pad(levels[level], (0, -sizes[level] % branches)).unflatten(-1, (-1, branches)).sum(-1)
        levels[level - 1] = levels[level - 1] + decay * F.pad(below, (0, sizes[level - 1] - below.shape[-1]))
    for level in range(1, len(sizes)):
        above = levels[level - 1][..., : -(-sizes[level] // branches)].unsqueeze(-1)
        above = above.expand(*above.shape[:-1], branches).flatten(-2)
        # What stands above holds decay times the node's own sum.
        levels[level] = (1 - decay * decay) * levels[level] + decay * above[..., : sizes[level]]
    return torch.cat(levels, -1)


def masked_product(q: Tensor, k: Tensor, v: Tensor, product: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    """(L * Q K^T) V in the linear order: y_i = sum over n of q_in (L (k_n v_p))_i.

    k (B, L, H, N) and v (B, L, H, P) are contracted first, to N P channels per token, of which L takes a few at a time,
    and which are computed again in the backward pass: memory is that of the values. product: L x for x (B, H, ..., L),
    with `parameters` as further arguments. Returns (B, L, H, P) in float32 at least.
    """
    q, k, v = (working(part).permute(0, 2, 3, 1) for part in (q, k, v))

    def block(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return (q.unsqueeze(3) * product(k.unsqueeze(3) * v.unsqueeze(2), *parameters)).sum(2)

    y = torch.zeros_like(v)
    for q_part, k_part in zip(q.split(STATE_BLOCK, 2), k.split(STATE_BLOCK, 2), strict=True):
        y = y + recomputed(block, q_part, k_part, v, *parameters)
    return y.permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedAttentionConfig(HeadsConfig):
    """Options of structured masked attention, the same for all masks."""

    contraction: Literal["auto", "quadratic", "linear", "associative"] = "auto"
    """Order of the contraction: quadratic makes all scores first, linear contracts keys and values first and applies
    the mask by its fast algorithm; associative is linear with causal masks applied by an associative scan. auto: linear
    with causal masks, which have a scan in chunks, otherwise that of fewer operations at the length of the input."""
    bias: bool = False
    """Biases in the four projections."""


class MaskedAttention(Mixer):
    """The projections, heads and norm that all masks share."""

    Config = MaskedAttentionConfig

    def __init__(self, d_model: int, config: MaskedAttentionConfig, **options):
        super().__init__(d_model, config, **options)
        self.nheads = head_count(d_model, config)
        inner = self.nheads * config.headdim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, inner, bias=config.bias) for _ in range(3))
        self.norm = RMSNormWeight(inner)
        self.out_proj = nn.Linear(inner, d_model, bias=config.bias)

    @classmethod
    def check(cls, d_model: int, config: MaskedAttentionConfig) -> None:
        super().check(d_model, config)
        cls.require_heads(d_model, config)
        scans = cls.causal_form or config.contraction != "associative"
        cls.require(scans, config, "contraction", "is a scan, for causal masks; use linear")

    @classmethod
    def why_no_context(cls, config: MaskedAttentionConfig, causal: bool) -> str:
        if cls.fixed_length:
            return super().why_no_context(config, causal)
        if config.contraction == "quadratic":
            return 'makes all scores on one rank with contraction = "quadratic"'
        if config.contraction == "associative":
            return 'scans whole rows on one rank with contraction = "associative"'
        return ""

    @classmethod
    def mixing_flops(cls, d_model: int, config: MaskedAttentionConfig, seqlen: int, causal: bool) -> float:
        nheads, headdim = head_count(d_model, config), config.headdim
        seen = (seqlen + 1) / 2 if causal else seqlen
        quadratic = cls.is_quadratic(config, seqlen)
        return nheads * (4 * seen * headdim if quadratic else cls.linear_flops(config, seqlen))

    @classmethod
    def is_quadratic(cls, config: MaskedAttentionConfig, seqlen: int) -> bool:
        """Whether all scores of `seqlen` tokens are made first."""
        if config.contraction == "auto" and not cls.causal_form:
            return 4 * seqlen * config.headdim < cls.linear_flops(config, seqlen)
        return config.contraction == "quadratic"

    @classmethod
    def linear_flops(cls, config: MaskedAttentionConfig, seqlen: int) -> float:
        """Floating-point operations of the linear order for one token of one head."""
        raise NotImplementedError

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q with its scale, k and v, each (..., H, headdim)."""
        q, k, v = (layer(x).unflatten(-1, (self.nheads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return q * self.config.headdim**-0.5, k, v

    def mask(self, x: Tensor) -> Tensor:
        """L (B or 1, H or 1, L, L), entry by entry."""
        raise NotImplementedError

    def linear_order(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Y (B, L, H, P) by the fast algorithm of L; only masks with scans are given documents."""
        raise NotImplementedError

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        whole = self.config.contraction in ("quadratic", "associative") or not self.causal_form
        if cu_seqlens is not None and whole and self.context is None:
            return self.forward_by_document(x, cu_seqlens)
        if self.context is not None or not self.is_quadratic(self.config, x.shape[1]):
            return self.combine(self.linear_order(x, cu_seqlens), x)
        return self.combine(recomputed(self.quadratic_order, x), x)

    def quadratic_order(self, x: Tensor) -> Tensor:
        """Y (B, L, H, P) from all scores, L for each token, which are made again in the backward pass."""
        v = self.values(x)
        return self.mix(self.matrix(x).to(v.dtype), v)

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        return torch.einsum("bthn,bshn->bhts", q, k) * self.mask(x)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        weight = weight_of(self.norm)
        y = F.rms_norm(working(mixed), mixed.shape[-1:], eps=self.norm.eps).flatten(-2) * weight
        return self.out_proj(y.to(weight.dtype))


class SmaCausal(MaskedAttention):
    """Causal linear attention: L is the lower triangle of ones."""

    causal_form = True
    rank_option = "headdim"
    static_step = True
    takes_in_place = True
    carries = True

    @classmethod
    def linear_flops(cls, config: MaskedAttentionConfig, seqlen: int) -> float:
        # State, write and read take a multiply-add per state element each.
        return 2.0 * 3 * config.headdim**2

    def log_gates(self, x: Tensor) -> Tensor | None:
        """Logarithms of the gates for x (..., d_model): (..., H), (H,) where they are constant, or None."""
        return None

    def mask(self, x: Tensor) -> Tensor:
        """L[i, j] = product of the gates of j + 1 .. i for i >= j, else 0, in float32 at least."""
        gates, length = self.log_gates(x), x.shape[1]
        lower = x.new_ones(length, length, dtype=torch.promote_types(x.dtype, torch.float32)).tril()
        return lower[None, None] if gates is None else gate_sums(gates, length).exp() * lower

    def linear_order(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = self.project(x)
        if self.config.contraction == "associative":
            logs = self.log_gates(x)
            gates = x.new_ones(1) if logs is None else working(logs).exp()
            gates = gates.expand(*x.shape[:2], self.nheads).permute(0, 2, 1)[:, :, None, None]
            return masked_product(q, k, v, associative_scan, gates)
        return semiseparable_scan(v, q, k, self.log_gates(x), cu_seqlens=cu_seqlens, context=self.context)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        """Zero: (batch_size, H, headdim, headdim), the sum of k v^T, in float32 at least."""
        headdim = self.config.headdim
        return zero_state(self.k_proj, device, batch_size, self.nheads, headdim, headdim, exact=True)

    def forward_with_state(
        self, x: Tensor, state: Tensor, cu_seqlens: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x)
        options = {"cu_seqlens": cu_seqlens, "in_place": in_place, "context": self.context}
        y, state = scan_on(v, q, k, self.log_gates(x), initial_state=state, **options)
        return self.combine(y, x), state

    step = forward_with_state


class SmaDecay(SmaCausal):
    """RetNet's mask: L[i, j] = gamma^(i - j) for i >= j, gamma = sigmoid(gamma_logit) learned per head."""

    def __init__(self, d_model: int, config: MaskedAttentionConfig, **options):
        super().__init__(d_model, config, **options)
        self.gamma_logit = nn.Parameter(torch.empty(self.nheads))
        self.init_rules |= {"gamma_logit": retnet_decay_logits}

    def log_gates(self, x: Tensor) -> Tensor:
        return F.logsigmoid(self.gamma_logit.to(torch.promote_types(x.dtype, torch.float32)))


class SmaSemiseparable(SmaCausal):
    """L is 1-semiseparable: L[i, j] = a_{j+1} ... a_i for i >= j, a_t = sigmoid(W x_t + b) per head."""

    def __init__(self, d_model: int, config: MaskedAttentionConfig, **options):
        super().__init__(d_model, config, **options)
        self.gate_proj = ExactLinear(d_model, self.nheads)
        self.init_rules |= {"gate_proj.bias": retnet_decay_logits}

    def log_gates(self, x: Tensor) -> Tensor:
        return F.logsigmoid(exact_linear(x, self.gate_proj))


class SmaToeplitz(MaskedAttention):
    """L[i, j] = alpha_{i - j}, learned per head for all offsets: alpha (H, 2 N - 1), offset 0 in the middle."""

    bidirectional_form = True
    sequence_aligned = False
    complexity = "O(L log L)"
    fixed_length = True

    def __init__(self, d_model: int, config: MaskedAttentionConfig, *, max_seqlen: int, **options):
        super().__init__(d_model, config, max_seqlen=max_seqlen, **options)
        self.alpha = nn.Parameter(torch.empty(self.nheads, 2 * max_seqlen - 1))
        self.init_rules |= {"alpha": retnet_decays_both_ways}

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"alpha": ()}

    @classmethod
    def linear_flops(cls, config: MaskedAttentionConfig, seqlen: int) -> float:
        # A real transform of n points costs half of the complex one's 5 n log2(n); there and back.
        points = transform_length(seqlen)
        transforms = 5 * math.log2(points) * points / seqlen
        return config.headdim**2 * (transforms + 3 * points / seqlen + 3)

    def mask(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1], device=x.device)
        return self.alpha[:, (position[:, None] - position) + self.max_seqlen - 1].unsqueeze(0)

    def linear_order(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return masked_product(*self.project(x), toeplitz_mask_product, toeplitz_spectrum(self.alpha, x.shape[1]))


class SmaFourier(MaskedAttention):
    """L[i, j] = cos(2 pi i j / L): no parameters, any length."""

    bidirectional_form = True
    sequence_aligned = False
    complexity = "O(L log L)"

    @classmethod
    def linear_flops(cls, config: MaskedAttentionConfig, seqlen: int) -> float:
        return config.headdim**2 * (2.5 * math.log2(max(seqlen, 2)) + 3)

    def mask(self, x: Tensor) -> Tensor:
        return fourier_mask(x.shape[1], x)

    def linear_order(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = self.project(x)

        def mixed(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return masked_product(q, k, v, partial(cosine_transform, dim=-1))

        if self.context is None:
            return mixed(v, q, k)
        return documents_over_heads(mixed, self.context, cu_seqlens, v, q, k)


@dataclass(frozen=True, kw_only=True, slots=True)
class SmaGraphConfig(MaskedAttentionConfig):
    """Options of structured masked attention over a graph."""

    graph: Literal["grid", "tree"] = "grid"
    """The graph whose nodes are the positions: a grid, row by row, or a tree, level by level."""
    columns: int = 0
    """Columns of the grid; 0 = the root of model.max_seqlen, rounded down, as of square pictures."""
    branches: int = 2
    """How many nodes hang from each node of the tree."""


class SmaGraph(MaskedAttention):
    """L[i, j] = gamma^(edges between i and j) in a graph of the positions (arXiv 2107.07999), gamma =
    sigmoid(gamma_logit) learned per head. A subclass with `distances` of its own has the masks of that graph, with
    contraction = "quadratic"."""

    Config = SmaGraphConfig
    bidirectional_form = True

    def __init__(self, d_model: int, config: SmaGraphConfig, **options):
        super().__init__(d_model, config, **options)
        self.columns = config.columns or math.isqrt(self.max_seqlen)
        self.gamma_logit = nn.Parameter(torch.empty(self.nheads))
        self.init_rules |= {"gamma_logit": retnet_decay_logits}

    @classmethod
    def check(cls, d_model: int, config: SmaGraphConfig) -> None:
        super().check(d_model, config)
        cls.require_least(config, columns=0, branches=2)
        foreign = cls.distances is not SmaGraph.distances and cls.linear_order is SmaGraph.linear_order
        fits = not foreign or config.contraction == "quadratic"
        cls.require(fits, config, "contraction", f"knows grids and trees alone; {cls.__name__} needs quadratic")

    @classmethod
    def why_no_context(cls, config: SmaGraphConfig, causal: bool) -> str:
        return "needs whole rows on one rank"

    @classmethod
    def linear_flops(cls, config: SmaGraphConfig, seqlen: int) -> float:
        # Four scans of four operations, and their sums; or two to go up and three to go down. Three contract.
        return config.headdim**2 * (23.0 if config.graph == "grid" else 8.0)

    def distances(self, length: int, device: torch.device) -> Tensor:
        """The number of edges between any two of the first `length` positions: (L, L), int64."""
        node = torch.arange(length, device=device)
        if self.config.graph == "grid":
            places = node // self.columns, node % self.columns
            return sum((place[:, None] - place).abs() for place in places)
        one, other = torch.broadcast_tensors(node[:, None], node)
        edges = torch.zeros_like(one)
        # Of two nodes the later one is no higher up: it climbs until both are the same.
        for _ in range(2 * (len(tree_levels(length, self.config.branches)) - 1)):
            edges = edges + (one != other)
            above = (torch.maximum(one, other) - 1).div(self.config.branches, rounding_mode="floor")
            one, other = torch.where(one == other, one, above), torch.minimum(one, other)
        return edges

    def log_decays(self) -> Tensor:
        """log gamma (H,), in float32 at least."""
        return F.logsigmoid(working(self.gamma_logit))

    def mask(self, x: Tensor) -> Tensor:
        return (self.log_decays()[:, None, None] * self.distances(x.shape[1], x.device)).exp().unsqueeze(0)

    def linear_order(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if self.config.graph == "tree":
            product = partial(tree_product, branches=self.config.branches)
        else:
            product = partial(grid_product, columns=self.columns)
        return masked_product(*self.project(x), product, self.log_decays().exp()[:, None, None, None])


def retnet_decay_logits(shape: torch.Size, generator: Any) -> Tensor:
    """Logits (H,) of RetNet's decays 1 - 2^(-5 - h) of head h (arXiv 2307.08621, section 3.1)."""
    return ((5.0 + torch.arange(shape[0])).exp2() - 1).log()


def retnet_decays_both_ways(shape: torch.Size, generator: Any) -> Tensor:
    """alpha_t = gamma_h^|t| with RetNet's decays: (H, 2 N - 1), offset 0 in the middle."""
    distance = (torch.arange(shape[1]) - shape[1] // 2).abs()
    return (F.logsigmoid(retnet_decay_logits(shape, generator)).unsqueeze(-1) * distance).exp()
