"""S4D, the diagonal form of the state space model S4 (arXiv 2206.11893): one long convolution per channel, the same for
all data."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import over_heads
from matmix.kernels.functions import outside_autocast
from matmix.model.initialization import InitRule, constant_init, normal_init
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.convolutions.long import (
    convolution_matrix,
    long_convolution,
    long_convolution_flops,
    packed_convolution,
)

CARRIED = 256
"""Tokens of a prompt that are taken at once, with the state between them: memory grows with this times d_state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class S4DConfig:
    """Options of the S4D mixer."""

    d_state: int = 64
    """Real size of the state of a channel (even): d_state / 2 complex numbers, each with its conjugate."""
    spectrum: Literal["lin", "inv"] = "lin"
    """Frequencies at initialisation: lin n pi; inv d_state / pi (d_state / (2 n + 1) - 1)."""
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""
    bias: bool = True
    """Bias in the output projection."""


class S4D(Mixer):
    """y = x convolved with K, plus D x; gelu; out_proj to twice the width and a gated linear unit.

    Per channel K[l] = 2 Re sum_n C_n (exp(dt A_n) - 1) / A_n exp(dt A_n l), the discretisation by zero-order hold.
    The bidirectional form has a second kernel with its own C for later tokens, as S4 has: its tap l belongs to the
    token l + 1 ahead.
    """

    Config = S4DConfig
    causal_form = True
    takes_context = True
    bidirectional_form = True
    sequence_aligned = False
    # A pair of conjugate exponentials is a real sequence of order 2.
    rank_option = "d_state"
    complexity = "O(L log L)"
    not_decayed = ("log_dt", "A_log", "A_imag", "D")
    static_step = True
    data_dependent = False

    def __init__(self, d_model: int, config: S4DConfig, *, causal: bool, **options):
        super().__init__(d_model, config, causal=causal, **options)
        pairs = config.d_state // 2
        self.log_dt = nn.Parameter(torch.empty(d_model))
        # log(-Re A) and Im A of all channels in one row each.
        self.A_log = nn.Parameter(torch.empty(d_model * pairs))
        self.A_imag = nn.Parameter(torch.empty(d_model * pairs))
        self.C = nn.Parameter(torch.empty(1 if causal else 2, d_model, pairs, 2))
        self.D = nn.Parameter(torch.empty(d_model))
        self.out_proj = nn.Linear(d_model, 2 * d_model, bias=config.bias)
        self.init_rules |= {
            "log_dt": partial(draw_between, low=math.log(config.dt_min), high=math.log(config.dt_max)),
            "A_log": constant_init(math.log(0.5)),
            "A_imag": self.frequencies(config),
            "C": normal_init(0.5**0.5),
            "D": normal_init(1.0),
        }

    @staticmethod
    def frequencies(config: S4DConfig) -> InitRule:
        """How A_imag starts."""
        return partial(draw_spectrum, spectrum=config.spectrum, d_state=config.d_state)

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"out_proj.weight": 2 * (self.d_model,)}

    @classmethod
    def check(cls, d_model: int, config: S4DConfig) -> None:
        super().check(d_model, config)
        even = config.d_state >= 2 and config.d_state % 2 == 0
        cls.require(even, config, "d_state", "must be even and at least 2")
        cls.require_steps(config)

    @classmethod
    def mixing_flops(cls, d_model: int, config: S4DConfig, seqlen: int, causal: bool) -> float:
        kernels = 1 if causal else 2
        # The kernel is counted as made for each document; a batch shares it.
        return d_model * (long_convolution_flops(seqlen) + kernels * 2.0 * config.d_state + 2)

    def rates(self) -> Tensor:
        """dt A (d_model, d_state / 2), complex64 at least: a step multiplies the state by its exponential."""
        exact = torch.promote_types(self.log_dt.dtype, torch.float32)
        parts = (-self.A_log.to(exact).exp(), self.A_imag.to(exact))
        decay, turn = (part.unflatten(0, (self.d_model, -1)) for part in parts)
        return torch.complex(decay, turn) * self.log_dt.to(exact).exp().unsqueeze(-1)

    def coefficients(self) -> Tensor:
        """2 C (exp(dt A) - 1) / A (kernels, d_model, d_state / 2), such that K[l] = Re sum_n of it exp(dt A_n l)."""
        rates = self.rates()
        # exp - 1 without cancellation where dt A is small.
        half_turn = torch.sin(rates.imag / 2)
        grown = torch.complex(
            torch.expm1(rates.real) * torch.cos(rates.imag) - 2 * half_turn.square(),
            rates.real.exp() * torch.sin(rates.imag),
        )
        dt = self.log_dt.to(rates.real.dtype).exp().unsqueeze(-1)
        return 2 * torch.view_as_complex(self.C.to(rates.real.dtype)) * (grown * dt / rates)

    def kernels(self, length: int, channels: slice = slice(None)) -> Tensor:
        """K (kernels, channels, length), in about 2 sqrt(length) exponentials per rate: with l = i J + j the sum over n
        is a product of the matrices exp(dt A i J) and exp(dt A j)."""
        rates, coefficients = self.rates()[channels], self.coefficients()[:, channels]
        inner = 1 << (max(length - 1, 1).bit_length() + 1) // 2
        outer = -(-length // inner)
        steps = torch.arange(max(inner, outer), dtype=rates.real.dtype, device=rates.device)
        fine = (rates.unsqueeze(-1) * steps[:inner]).exp()
        coarse = (rates.unsqueeze(-2) * (inner * steps[:outer]).unsqueeze(-1)).exp() * coefficients.unsqueeze(-2)
        # The real part of the product by a real product of twice the size.
        product = torch.cat([coarse.real, -coarse.imag], -1) @ torch.cat([fine.real, fine.imag], -2)
        return product.flatten(-2)[..., :length]

    @outside_autocast
    def mixed(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """K * x + D x (B, L, d_model) in float32 at least; of a part of a row typed like x."""

        def convolved(x: Tensor, cu_seqlens: Tensor | None, channels: slice) -> Tensor:
            x = x.squeeze(-1)
            y = packed_convolution(x, cu_seqlens, partial(self.taps, channels=channels))
            return (y + self.D[channels].to(y.dtype) * x).unsqueeze(-1)

        return over_heads(convolved, self.context, cu_seqlens, x.unsqueeze(-1)).squeeze(-1)

    def taps(self, length: int, channels: slice = slice(None)) -> tuple[Tensor, ...]:
        """K (channels, length), and if bidirectional that of later tokens (channels, length - 1)."""
        after, *other = self.kernels(length, channels)
        return after, *(before[:, :-1] for before in other)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        return self.finish(self.mixed(x, cu_seqlens), x)

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Applies gelu, the projection and the gated linear unit to (B, L, d_model)."""
        return F.glu(self.out_proj(F.gelu(mixed.to(x.dtype))), dim=-1)

    def matrix(self, x: Tensor) -> Tensor:
        """Toeplitz matrices of the kernels by their formula, plus D on the diagonal, (1, d_model, L, L)."""
        lags = torch.arange(x.shape[1], device=x.device)
        powers = (self.rates().unsqueeze(-1) * lags).exp()
        return self.toeplitz((self.coefficients().unsqueeze(-1) * powers).sum(-2).real)

    def toeplitz(self, kernels: Tensor) -> Tensor:
        """The matrices of K (kernels, d_model, L), plus D on the diagonal, (1, d_model, L, L)."""
        after, *other = kernels
        m = convolution_matrix(after, *(before[:, :-1] for before in other))
        return (m + torch.diag_embed(self.D.to(m.dtype).unsqueeze(-1).expand(m.shape[:-1]))).unsqueeze(0)

    def values(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed.squeeze(-1), x)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        """Zeros, (batch_size, d_model, d_state / 2) complex64 (complex128 with float64 weights)."""
        exact = torch.promote_types(self.log_dt.dtype, torch.float32)
        shape = (batch_size, self.d_model, self.config.d_state // 2)
        return self.log_dt.new_zeros(shape, dtype=exact.to_complex(), device=device)

    @outside_autocast
    def continued(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """`mixed`, also of one token x (B, d_model), and the new state, from a state: s_t = exp(dt A) s_{t-1} + x_t,
        y_t = Re sum_n coefficient_n s_t."""
        rates, coefficients = self.rates(), self.coefficients()[0]
        state = state.to(rates.dtype)
        if x.dim() == 2:
            state = rates.exp() * state + x.unsqueeze(-1)
            y = (coefficients * state).sum(-1).real
            return y + self.D.to(y.dtype) * x, state
        length = min(x.shape[1], CARRIED)
        powers = (rates.unsqueeze(-1) * torch.arange(length, device=x.device)).exp()
        (kernel,) = self.taps(length)
        outputs = []
        for piece in x.split(length, 1):
            lags = powers[..., : piece.shape[1]]
            carried = rates.exp() * state  # what is left of the state at the first new token
            kept = torch.einsum("hnl,bhn->blh", lags, coefficients * carried).real
            outputs.append(long_convolution(piece, kernel[:, : piece.shape[1]]) + kept)
            added = torch.einsum("hnl,blh->bhn", lags.flip(-1), piece.to(rates.dtype))
            state = carried * lags[..., -1] + added
        y = torch.cat(outputs, 1)
        return y + self.D.to(y.dtype) * x, state

    def forward_with_state(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        mixed, state = self.continued(x, state)
        return self.finish(mixed, x), state

    step = forward_with_state


def draw_between(shape: torch.Size, generator: torch.Generator, *, low: float, high: float) -> Tensor:
    """Values from U[low, high]."""
    return torch.empty(shape).uniform_(low, high, generator=generator)


def draw_spectrum(shape: torch.Size, generator: torch.Generator, *, spectrum: str, d_state: int) -> Tensor:
    """The frequencies of all channels, flattened: S4D-Lin or S4D-Inv (arXiv 2206.11893, section 4)."""
    n = torch.arange(d_state // 2, dtype=torch.float32)
    frequencies = math.pi * n if spectrum == "lin" else d_state / math.pi * (d_state / (2 * n + 1) - 1)
    return frequencies.repeat(shape[0] // n.numel())
