"""Causal linear attention (arXiv 2006.16236): attention whose exp(q . k) is phi(q) . phi(k), with a state of fixed
size."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import semiseparable_scan
from matmix.kernels.functions import working
from matmix.model.mixers.base import head_count, scan_on, zero_state
from matmix.model.mixers.scans.features import FeatureConfig, FeatureMixer


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionConfig(FeatureConfig):
    """Options of the linear attention mixer."""

    headdim: int = 64
    """Channels per head."""
    feature_map: Literal[
        "elu", "silu", "silu_norm", "none", "performer", "rfa", "cosformer", "polynomial", "taylor"
    ] = "elu"
    """The feature map of queries and keys: elu(x) + 1, silu(x), silu(x) + 1/2 divided by its length, the identity, or
    one of scans/features.py."""
    normalize: bool = True
    """Divide each output by the sum of its row of M; not for the feature maps silu and none, whose sums vanish.
    Without it outputs grow with the length."""
    eps: float = 1e-6
    """Added to the row sums."""
    bias: bool = False
    """Biases in all four projections."""


class LinearAttention(FeatureMixer):
    """y_t = q_t S_t / (q_t z_t + eps) with S_t = S_{t-1} + k_t v_t^T and z_t = z_{t-1} + k_t, q and k after the
    feature map; without the normaliser y_t = q_t S_t / sqrt(headdim)."""

    Config = LinearAttentionConfig
    causal_form = True
    takes_context = True
    words: ClassVar = {"silu": "plain_silu"}
    static_step = True
    takes_in_place = True
    carries = True
    row_normalized = True

    def __init__(self, d_model: int, config: LinearAttentionConfig, **options):
        super().__init__(d_model, config, **options)
        self.nheads = head_count(d_model, config)
        inner = self.nheads * config.headdim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, inner, bias=config.bias) for _ in range(3))
        self.out_proj = nn.Linear(inner, d_model, bias=config.bias)

    @classmethod
    def check(cls, d_model: int, config: LinearAttentionConfig) -> None:
        super().check(d_model, config)
        vanishing = (
            f"divides by row sums, which feature_map = {config.feature_map!r} lets vanish; use "
            'feature_map = "elu" or normalize = false'
        )
        cls.require(not config.normalize or cls.feature_map(config).divides, config, "normalize", vanishing)
        least = config.eps > 0 or (config.eps == 0 and (config.feature_map == "elu" or not config.normalize))
        cls.require(least, config, "eps", 'must be positive; with feature_map = "elu" it may be 0')
        performer = "is what undoes the scale of Performer's queries; set it to true"
        cls.require(config.normalize or config.feature_map != "performer", config, "normalize", performer)

    @classmethod
    def mixing_flops(cls, d_model: int, config: LinearAttentionConfig, seqlen: int, causal: bool) -> float:
        # Write and read take 2 multiply-adds per state element; the normaliser is one more column of the state.
        states = head_count(d_model, config) * cls.block_rank(config) * (config.headdim + config.normalize)
        return 4.0 * states + cls.feature_flops(d_model, config)

    def project(self, x: Tensor, angles: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """q and k (..., H, features) after the feature map, and v (..., H, headdim)."""
        q, k, v = (layer(x).unflatten(-1, (self.nheads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (part.to(v.dtype) for part in self.features(q, k, angles))
        return (q, k, v) if self.config.normalize else (q * self.config.headdim**-0.5, k, v)

    def widened(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v with a channel of ones, whose mixture is the sum of the row, if that is wanted; then q and k."""
        if not self.config.normalize:
            return v, q, k
        v = F.pad(v, (0, 1), value=1.0)
        # Sums over long rows are no float16 numbers, which end at 65,504.
        return (v.float(), q.float(), k.float()) if v.dtype == torch.float16 else (v, q, k)

    def finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The mixture of `widened` values over its last channel, the row sum, in `dtype`, projected."""
        if self.config.normalize:
            y = working(y)
            y = (y[..., :-1] / (y[..., -1:] + self.config.eps)).to(dtype)
        return self.out_proj(y.flatten(-2))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        q, k, v = self.project(x, self.turns(x.shape[1], cu_seqlens, x.device))
        rows = {"cu_seqlens": cu_seqlens, "context": self.context}
        return self.finish(semiseparable_scan(*self.widened(q, k, v), None, **rows), v.dtype)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        """Zeros (batch_size, H, features, headdim), and with the normaliser a column more; float32 at least."""
        shape = (batch_size, self.nheads, self.block_rank(self.config), self.config.headdim + self.config.normalize)
        return zero_state(self.k_proj, device, *shape, exact=True)

    def forward_with_state(
        self, x: Tensor, state: Tensor, cu_seqlens: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, Tensor]:
        token = x.dim() == 2
        if not token:
            self.check_input(x, cu_seqlens)
        q, k, v = self.project(x, 0.0 if token else self.turns(x.shape[1], cu_seqlens, x.device))
        options = {"cu_seqlens": cu_seqlens, "in_place": in_place, "context": self.context}
        given = state
        y, state = scan_on(*self.widened(q, k, v), None, initial_state=state, **options)
        if self.config.feature_map == "cosformer":
            length = 1 if token else x.shape[1] * (1 if self.context is None else self.context.size)
            new = state.new_full((1,), length) if cu_seqlens is None else cu_seqlens.diff()
            state = turned_back(state, self.turn(new))
            state = given.copy_(state) if in_place else state
        return self.finish(y, v.dtype), state

    step = forward_with_state

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x, self.turns(x.shape[1], None, x.device))
        matrix = torch.einsum("bthn,bshn->bhts", q, k).tril()
        if not self.config.normalize:
            return matrix
        exact = working(matrix)
        return (exact / (exact.sum(-1, keepdim=True) + self.config.eps)).to(matrix.dtype)


def turned_back(state: Tensor, angles: Tensor) -> Tensor:
    """A state (B, H, 2 N, P) of cosFormer's keys, whose angles count from the first token that it was not yet with, as
    angles from the next token on; these lie `angles` (B or 1,) apart. So states know no positions."""
    cosines, sines = state.chunk(2, 2)
    cos, sin = (part.to(state.dtype)[:, None, None, None] for part in (angles.cos(), angles.sin()))
    return torch.cat((cosines * cos + sines * sin, sines * cos - cosines * sin), 2)
