"""Linear randomised attention (LARA, arXiv 2204.04667): softmax attention as a mean over random directions, of which
each is drawn near some of the tokens."""

from dataclasses import dataclass

from torch import Tensor

from matmix.kernels.functions import outside_autocast, working
from matmix.model.mixers.attention.nystroem import Nystroem, means_of_spans
from matmix.model.mixers.base import HeadsConfig, head_count
from matmix.model.mixers.scans.features import directions


@dataclass(frozen=True, kw_only=True, slots=True)
class LARAConfig(HeadsConfig):
    """Options of linear randomised attention."""

    landmarks: int = 64
    """Spans of neighbouring tokens, near the means of which a direction each is drawn; at most one for each token."""
    bias: bool = False
    """Biases in all four projections."""


class LARA(Nystroem):
    """m_ij = sum_c a_ic xi(q_i, w_c) xi(k_j, w_c) over the sum of its row, xi(x, w) = exp(w . x - x^2 / 2), so that
    xi(q, w) xi(k, w) has the mean exp(q . k) over w of N(0, I); q and k over headdim^1/4.

    Direction w_c is drawn of p_c = N(q'_c + k'_c, I), ' means over span c. Its weight is a_ic = N(w_c; 0, I) / p_c(w_c)
    times p_c(w_c) / sum_d p_d(w_c) + t_ic - mean_d t_id, t_i = softmax_c(q_i . q'_c), 1e-8 at least. What w_c differs
    from its mean by is the same everywhere; the paper draws it again in each step and is without it in inference.
    """

    Config = LARAConfig

    @classmethod
    def mixing_flops(cls, d_model: int, config: LARAConfig, seqlen: int, causal: bool) -> float:
        # Two means, and five products with L x c matrices.
        return 14.0 * min(config.landmarks, seqlen) * head_count(d_model, config) * config.headdim

    def is_exact(self, length: int) -> bool:
        return False

    @outside_autocast
    def factors(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The two factors of M, (B, H, L, c) and (B, H, c, L), of rows that sum to 1, in float32 at least; q and k (B,
        L, H, N)."""
        q, k = (working(part).transpose(1, 2) * self.config.headdim**-0.25 for part in (q, k))
        means = means_of_spans(q.shape[2], min(self.config.landmarks, q.shape[2]), q)
        few_q = means @ q
        centre = few_q + means @ k
        w = centre + directions(*centre.shape[-2:], q)
        # Logarithms of p_d(w_c) / N(w_c; 0, I), row c and column d; of keys in the same way.
        density, keys = (w @ part.mT - part.square().sum(-1).unsqueeze(-2) / 2 for part in (centre, k))
        near = (q @ few_q.mT).softmax(-1)
        weight = density.softmax(-1).diagonal(dim1=-2, dim2=-1).unsqueeze(-2) + near - near.mean(-1, keepdim=True)
        logs = weight.clamp(min=1e-8).log() - density.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        # e^(-q^2 / 2) is in all terms of a row.
        return (logs + q @ w.mT + keys.logsumexp(-1).unsqueeze(-2)).softmax(-1), keys.softmax(-1)
