"""Causal linear attention (arXiv 2006.16236): attention whose exp(q . k) is phi(q) . phi(k), with a state of fixed
size."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import semiseparable_scan
from matmix.kernels.functions import working
from matmix.model.mixers.base import HeadsConfig, Mixer, head_count, scan_on, zero_state


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionConfig(HeadsConfig):
    """Options of the linear attention mixer."""

    headdim: int = 64
    """Channels per head: the rank of the blocks of M below the diagonal."""
    feature_map: Literal["elu", "silu", "none"] = "elu"
    """The feature map of queries and keys: elu(x) + 1, silu(x), or the identity."""
    normalize: bool = True
    """Divide each output by the sum of its row of M; needs feature_map = "elu", which keeps all entries positive.
    Without it outputs grow with the length."""
    eps: float = 1e-6
    """Added to the row sums."""
    bias: bool = False
    """Biases in all four projections."""


class LinearAttention(Mixer):
    """y_t = q_t S_t / (q_t z_t + eps) with S_t = S_{t-1} + k_t v_t^T and z_t = z_{t-1} + k_t, q and k after the
    feature map; without the normaliser y_t = q_t S_t / sqrt(headdim)."""

    Config = LinearAttentionConfig
    causal_form = True
    takes_context = True
    rank_option = "headdim"
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
        cls.require_heads(d_model, config)
        vanishing = (
            f"divides by row sums, which feature_map = {config.feature_map!r} lets vanish; use "
            'feature_map = "elu" or normalize = false'
        )
        cls.require(not config.normalize or config.feature_map == "elu", config, "normalize", vanishing)
        cls.require(config.eps >= 0, config, "eps", "must not be negative")

    @classmethod
    def mixing_flops(cls, d_model: int, config: LinearAttentionConfig, seqlen: int, causal: bool) -> float:
        # Write and read take 2 multiply-adds per state element; the normaliser is one more column of the state.
        return 4.0 * head_count(d_model, config) * config.headdim * (config.headdim + config.normalize)

    def feature(self, x: Tensor) -> Tensor:
        """phi(x), elementwise, in x's dtype."""
        if self.config.feature_map == "none":
            return x
        if self.config.feature_map == "silu":
            return F.silu(x)
        # elu(x) + 1 = exp(x) below 0 and x + 1 above, written so that small values do not cancel.
        exact = working(x)
        return (exact.clamp(max=0).exp() + exact.relu()).to(x.dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k after the feature map, and v, all (..., H, headdim)."""
        q, k, v = (layer(x).unflatten(-1, (self.nheads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.feature(q), self.feature(k)
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
        q, k, v = self.project(x)
        rows = {"cu_seqlens": cu_seqlens, "context": self.context}
        return self.finish(semiseparable_scan(*self.widened(q, k, v), None, **rows), v.dtype)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        """Zeros (batch_size, H, headdim, headdim), and with the normaliser a column more; float32 at least."""
        headdim = self.config.headdim
        shape = (batch_size, self.nheads, headdim, headdim + self.config.normalize)
        return zero_state(self.k_proj, device, *shape, exact=True)

    def forward_with_state(
        self, x: Tensor, state: Tensor, cu_seqlens: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x)
        options = {"cu_seqlens": cu_seqlens, "in_place": in_place, "context": self.context}
        y, state = scan_on(*self.widened(q, k, v), None, initial_state=state, **options)
        return self.finish(y, v.dtype), state

    step = forward_with_state

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        matrix = torch.einsum("bthn,bshn->bhts", q, k).tril()
        if not self.config.normalize:
            return matrix
        exact = working(matrix)
        return (exact / (exact.sum(-1, keepdim=True) + self.config.eps)).to(matrix.dtype)
