"""Cross mixing: outputs at T positions from the values at S others, Y = M f(source) with M (T x S) for each head, by
softmax and by linear attention (arXiv 1706.03762, section 3.2.3; 2405.21060, section 4.1).

What the layers of an `encoder_decoder` read their source with; mixers have one sequence.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels.functions import outside_autocast, working
from matmix.model.mixers.attention.packed import attend
from matmix.model.mixers.base import HeadsConfig, head_count
from matmix.model.mixers.scans.features import FEATURES, Given
from matmix.model.options import check_words


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionConfig(HeadsConfig):
    """Options of cross attention."""

    bias: bool = False
    """Biases in all four projections."""


class CrossAttention(nn.Module):
    """M = softmax(q k^T / sqrt(headdim)): q of x (B, T, d_model), k and v of a source (B, S, d_source)."""

    def __init__(self, d_model: int, d_source: int, config: Any):
        """Raises ValueError for options that are not known, and where neither `nheads` is given nor headdim divides
        d_model."""
        super().__init__()
        check_words(config, "cross attention: ")
        if config.headdim < 1 or config.nheads < 0 or (config.nheads == 0 and d_model % config.headdim):
            raise ValueError(
                f"cross attention: headdim = {config.headdim}, nheads = {config.nheads} fit no width d_model = "
                f"{d_model}; give a headdim that divides it, or nheads"
            )
        self.config, self.nheads = config, head_count(d_model, config)
        inner = self.nheads * config.headdim
        self.q_proj = nn.Linear(d_model, inner, bias=config.bias)
        self.k_proj, self.v_proj = (nn.Linear(d_source, inner, bias=config.bias) for _ in range(2))
        self.out_proj = nn.Linear(inner, d_model, bias=config.bias)

    def forward(self, x: Tensor, source: Tensor, real: Tensor | None = None) -> Tensor:
        """(B, T, d_model). real: bool (B, S), where the source is no padding, in each row somewhere; None = there is
        none. Raises ValueError for one of another shape or dtype."""
        return self.read(x, self.memory(source, real))

    def memory(self, source: Tensor, real: Tensor | None = None) -> Any:
        """What is to be kept of a source, for `read`: k and v (B, S, H, headdim), and the places that are real."""
        k, v = self.keys_and_values(source, real)
        return k, v, None if real is None else real[:, None, None]

    def read(self, x: Tensor, memory: Any) -> Tensor:
        """`forward` for the source that the memory was made of."""
        k, v, mask = memory
        return self.combine(attend(self.queries(x), k, v, mask=mask))

    def queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (self.nheads, -1))

    def keys_and_values(self, source: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        if real is not None:
            if real.dtype != torch.bool or real.shape != source.shape[:2]:
                raise ValueError(
                    f"cross attention: real is {real.dtype} {tuple(real.shape)}; give bool {tuple(source.shape[:2])}"
                )
            source = source.masked_fill(~real.unsqueeze(-1), 0)  # not even NaN is read there
        k, v = (layer(source).unflatten(-1, (self.nheads, -1)) for layer in (self.k_proj, self.v_proj))
        return k, v

    # -- the definition -------------------------------------------------------------------------------------------

    def matrix(self, x: Tensor, source: Tensor, real: Tensor | None = None) -> Tensor:
        """M (B, H, T, S), of which `forward` is combine(M f(source))."""
        k, _ = self.keys_and_values(source, real)
        scores = torch.einsum("bthn,bshn->bhts", self.queries(x), k) * self.config.headdim**-0.5
        return (scores if real is None else scores.masked_fill(~real[:, None, None], float("-inf"))).softmax(-1)

    def combine(self, mixed: Tensor) -> Tensor:
        """(B, T, H, headdim) -> (B, T, d_model)."""
        return self.out_proj(mixed.flatten(-2))


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossLinearAttentionConfig(CrossAttentionConfig):
    """Options of linear cross attention."""

    feature_map: Literal["elu", "silu", "silu_norm", "performer", "rfa", "polynomial", "taylor"] = "elu"
    """The feature map of queries and keys, one of scans/features.py. cosFormer's counts positions of one sequence."""
    random_features: int = 0
    """performer, rfa: the number of random directions; 0 = headdim."""
    taylor_order: int = 2
    """taylor: the last power of the series, even."""
    eps: float = 1e-6
    """Added to the row sums."""


class CrossLinearAttention(CrossAttention):
    """M = phi(q) phi(k)^T over its row sums (arXiv 2006.16236), in O(T + S): the source is contracted first, to a
    memory whose size does not grow with it."""

    def __init__(self, d_model: int, d_source: int, config: Any):
        super().__init__(d_model, d_source, config)
        if config.taylor_order < 2 or config.taylor_order % 2:
            raise ValueError(
                f"cross attention: taylor_order = {config.taylor_order}: must be even and at least 2, as odd sums fall "
                "below 0"
            )

    @outside_autocast
    def features(self, x: Tensor, query: bool) -> Tensor:
        """phi of q or k (..., H, headdim) -> (..., H, features), in float32 at least."""
        config = self.config
        given = Given(query, config.random_features or config.headdim, 0.0, config.taylor_order)
        return FEATURES[config.feature_map].apply(working(x), given)

    def memory(self, source: Tensor, real: Tensor | None = None) -> Tensor:
        """The sum of phi(k) v^T, v with a channel of ones: (B, H, features, headdim + 1), in float32 at least."""
        k, v = self.keys_and_values(source, real)
        return self.written(self.features(k, False), v, real)

    @outside_autocast
    def written(self, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        k = k if real is None else k * real[:, :, None, None]
        return torch.einsum("bshn,bshp->bhnp", k, F.pad(working(v), (0, 1), value=1.0))

    def read(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.queries(x)
        return self.combine(self.mixed(self.features(q, True), memory).to(q.dtype))

    @outside_autocast
    def mixed(self, q: Tensor, memory: Tensor) -> Tensor:
        y = torch.einsum("bthn,bhnp->bthp", q, memory)
        return y[..., :-1] / (y[..., -1:] + self.config.eps)

    def matrix(self, x: Tensor, source: Tensor, real: Tensor | None = None) -> Tensor:
        k, _ = self.keys_and_values(source, real)
        scores = torch.einsum("bthn,bshn->bhts", self.features(self.queries(x), True), self.features(k, False))
        scores = scores if real is None else scores * real[:, None, None]
        return scores / (scores.sum(-1, keepdim=True) + self.config.eps)
