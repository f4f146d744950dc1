"""Feature maps of linear attention and LION, whose scores are phi(q) . phi(k)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.functions import outside_autocast, working
from matmix.kernels.lion.chunked import FEATURE_MAPS
from matmix.model.mixers.base import HeadsConfig, Mixer, head_count
from matmix.model.positions import document_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureConfig(HeadsConfig):
    """Options of those feature maps that have some."""

    random_features: int = 0
    """performer, rfa: the number of random directions, of which rfa makes two features each; 0 = headdim."""
    reach: int = 0
    """cosformer: the distance of two tokens at which scores fall to 0, and the longest document; 0 =
    model.max_seqlen."""
    taylor_order: int = 2
    """taylor: the last power of the series, even."""


def directions(count: int, width: int, like: Tensor) -> Tensor:
    """(count, width), typed like `like`: random directions, as Gaussian ones and the same everywhere.

    `width` at a time are orthogonal, as in FAVOR+ (arXiv 2009.14794): rows of C D C D C D, D random signs and C the
    cosine transform (1703.00864), times lengths of Gaussian vectors. Their signs and lengths are made of a hash of
    their places, so there is nothing to draw, to keep in checkpoints or to move to a device.
    """
    blocks, low = -(-count // width), 0xFFFFFFFF
    bits = torch.arange(1, 4 * blocks * width + 1, device=like.device) * 0x9E3779B9 & low
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # MurmurHash3's last steps
        bits = (bits ^ bits >> shift) * factor & low
    *signs, parts = bits.view(4, blocks, width)
    place = torch.arange(width, device=like.device)
    turns = (place.unsqueeze(1) * (2 * place + 1)).to(like.dtype) * (math.pi / (2 * width))
    cosines = turns.cos() * (2 / (1 + (place == 0).to(like.dtype)) / width).sqrt().unsqueeze(1)
    first, second, third = (cosines * (1 - 2 * (sign & 1)).to(like.dtype).unsqueeze(1) for sign in signs)
    # The squares of the lengths by Wilson and Hilferty's approximation of chi squared.
    normal = 2**0.5 * (2 * (parts.double() + 0.5) / 2**32 - 1).erfinv()
    lengths = width**0.5 * (1 - 2 / (9 * width) + normal * (2 / (9 * width)) ** 0.5).clamp(min=0) ** 1.5
    return ((first @ second @ third) * lengths.to(like.dtype).unsqueeze(-1)).flatten(0, 1)[:count]


class Given(NamedTuple):
    """What a feature map knows besides its vectors (..., H, headdim)."""

    query: bool
    random_features: int
    angles: Tensor | float
    """pi / 2 for each `reach` before the vector, as (..., 1, 1)."""
    taylor_order: int = 2


def performer(x: Tensor, given: Given) -> Tensor:
    """FAVOR+ of Performer (arXiv 2009.14794), exp(w . x - x^2 / 2) for x / headdim^1/4: scores are about
    exp(q . k / sqrt(headdim)). Queries are divided by the largest of theirs, which the sums of rows undo."""
    x = x * x.shape[-1] ** -0.25
    logs = x @ directions(given.random_features, x.shape[-1], x).mT - x.square().sum(-1, keepdim=True) / 2
    return (logs - logs.amax(-1, keepdim=True) if given.query else logs).exp() * given.random_features**-0.5


def rfa(x: Tensor, given: Given) -> Tensor:
    """Random feature attention (arXiv 2103.02143) without gate, (sin w . x, cos w . x) for x of length 1: scores are
    about exp(q . k - 1)."""
    turns = F.normalize(x, dim=-1) @ directions(given.random_features, x.shape[-1], x).mT
    return torch.cat((turns.sin(), turns.cos()), -1) * given.random_features**-0.5


def cosformer(x: Tensor, given: Given) -> Tensor:
    """cosFormer (arXiv 2202.08791): scores are relu(q) . relu(k) cos(pi (i - j) / (2 reach))."""
    angles = torch.as_tensor(given.angles, dtype=x.dtype, device=x.device)
    return torch.cat((x.relu() * angles.cos(), x.relu() * angles.sin()), -1)


def polynomial(x: Tensor, given: Given) -> Tensor:
    """All products of two of (1, x / headdim^1/4): scores are (1 + q . k / sqrt(headdim))^2."""
    x = F.pad(x * x.shape[-1] ** -0.25, (1, 0), value=1.0)
    rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., rows] * x[..., columns] * (1 + (rows != columns).to(x.dtype)).sqrt()


def taylor(x: Tensor, given: Given) -> Tensor:
    """The series of exp up to a power, 1 + s + s^2 / 2 + ... for s = q . k / sqrt(headdim), as in Based (arXiv
    2402.18668), by each product of powers once: those of x_i^a_i divided by the roots of the factorials of all a_i."""
    x = F.pad(x * x.shape[-1] ** -0.25, (1, 0), value=1.0)
    width, terms = x.shape[-1], x
    last = numbers = torch.arange(width, device=x.device)
    counts = runs = torch.ones_like(numbers)
    for order in range(2, given.taylor_order + 1):
        # Products stand in the order of their last factor, and each factor follows those that end no later.
        counts = counts.cumsum(0)
        columns = numbers.repeat_interleave(counts, output_size=math.comb(width - 1 + order, order))
        rows = torch.arange(len(columns), device=x.device) - (counts.cumsum(0) - counts)[columns]
        runs, last = torch.where(last[rows] == columns, runs[rows] + 1, 1), columns
        terms = terms[..., rows] * x[..., columns] * torch.where(columns == 0, 1, runs).to(x.dtype).rsqrt()
    return terms


class FeatureMap(NamedTuple):
    """A feature map."""

    apply: Callable[[Tensor, Given], Tensor]
    """(..., H, headdim) in float32 at least, and what else it is given, -> (..., H, width)."""
    width: Callable[[int, int, int], int] = lambda headdim, count, order: headdim
    """(headdim, random_features, taylor_order) -> features."""
    divides: bool = True
    """Sums of rows stay away from 0, so that rows may be divided by them."""


def _alone(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Given], Tensor]:
    return lambda x, given: function(x)


FEATURES = {
    **{name: FeatureMap(_alone(function)) for name, function in FEATURE_MAPS.items()},
    "performer": FeatureMap(performer, lambda headdim, count, order: count),
    "rfa": FeatureMap(rfa, lambda headdim, count, order: 2 * count),
    "cosformer": FeatureMap(cosformer, lambda headdim, count, order: 2 * headdim),
    "polynomial": FeatureMap(polynomial, lambda headdim, count, order: math.comb(headdim + 2, 2)),
    "taylor": FeatureMap(taylor, lambda headdim, count, order: math.comb(headdim + order, order)),
    "plain_silu": FeatureMap(_alone(F.silu), divides=False),
    "none": FeatureMap(_alone(lambda x: x), divides=False),
}


class FeatureMixer(Mixer):
    """A mixer with the option `feature_map`."""

    words: ClassVar[dict[str, str]] = {}
    """Values of that option -> names in `FEATURES`, where they are others."""

    @classmethod
    def feature_map(cls, config: Any) -> FeatureMap:
        return FEATURES[cls.words.get(config.feature_map, config.feature_map)]

    @classmethod
    def block_rank(cls, config: Any) -> int:
        """The number of features that q and k have."""
        count = config.random_features or config.headdim
        return cls.feature_map(config).width(config.headdim, count, config.taylor_order)

    @classmethod
    def feature_flops(cls, d_model: int, config: Any) -> float:
        """Floating-point operations that make the features of a token: those of the random directions."""
        random = config.feature_map in ("performer", "rfa")
        return 4.0 * random * head_count(d_model, config) * config.headdim * (config.random_features or config.headdim)

    @classmethod
    def check(cls, d_model: int, config: Any) -> None:
        super().check(d_model, config)
        cls.require_heads(d_model, config)
        cls.require_least(config, random_features=0, reach=0, taylor_order=2)
        cls.require(config.taylor_order % 2 == 0, config, "taylor_order", "must be even, as odd sums fall below 0")

    @classmethod
    def longest_document(cls, config: Any, max_seqlen: int) -> int | None:
        return (config.reach or max_seqlen) if config.feature_map == "cosformer" else None

    @classmethod
    def check_seqlen(cls, config: Any, seqlen: int, max_seqlen: int) -> None:
        longest = cls.longest_document(config, max_seqlen)
        if longest is not None and seqlen > longest:
            raise ValueError(
                f"model.mixers.{cls.name}.reach = {longest}: documents of {seqlen} tokens are longer, and scores "
                "beyond it are negative; train with a higher one, or take shorter documents"
            )

    def turns(self, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor | float:
        """`Given.angles` of tokens that stand one behind the other: (length, 1, 1), or 0.0 where none are wanted."""
        if self.config.feature_map != "cosformer":
            return 0.0
        return self.turn(document_positions(length, cu_seqlens, device, self.context)[:, None, None])

    def turn(self, tokens: Tensor) -> Tensor:
        """The angles of numbers of tokens, in float64."""
        return tokens.double() * (math.pi / 2 / self.longest_document(self.config, self.max_seqlen))

    @outside_autocast
    def features(self, q: Tensor, k: Tensor, angles: Tensor | float) -> tuple[Tensor, Tensor]:
        """phi(q) and phi(k), (..., H, headdim) -> (..., H, features), in float32 at least."""
        given = Given(True, self.config.random_features or self.config.headdim, angles, self.config.taylor_order)
        apply = self.feature_map(self.config).apply
        return apply(working(q), given), apply(working(k), given._replace(query=False))
