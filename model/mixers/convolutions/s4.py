"""S4 (arXiv 2111.00396): a long convolution whose kernel is that of a state-space model with a matrix that is diagonal
plus one of rank one, and begins as HiPPO-LegS."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from matmix.kernels.functions import outside_autocast
from matmix.model.initialization import InitRule
from matmix.model.mixers.convolutions.long import long_convolution
from matmix.model.mixers.convolutions.s4d import CARRIED, S4D


@dataclass(frozen=True, kw_only=True, slots=True)
class S4Config:
    """Options of S4."""

    d_state: int = 64
    """Real size of the state of a channel (even)."""
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""
    bias: bool = True
    """Bias in the output projection."""


class S4(S4D):
    """S4D whose transitions are A = diag(lambda) - P P^*, in conjugate pairs, made discrete by the bilinear rule.

    Of each pair one number is kept: the state is x of d_state / 2 complex numbers, A x = lambda x - 2 P Re(P^* x), and
    K[l] = 2 Re(C A'^l B') with A' = (1 - dt A / 2)^-1 (1 + dt A / 2) and B' = (1 - dt A / 2)^-1 dt B. The kernel comes
    from the powers of A' by doubling, log2 L products of d_state x d_state matrices; the paper has a Cauchy product for
    one length in its place.
    """

    Config = S4Config
    not_decayed = (*S4D.not_decayed, "P", "B")

    def __init__(self, d_model: int, config: S4Config, **options):
        super().__init__(d_model, config, **options)
        self.P = nn.Parameter(torch.empty(d_model, config.d_state // 2, 2))
        self.B = nn.Parameter(torch.empty(d_model, config.d_state // 2, 2))
        self.init_rules |= {name: partial(draw_hippo, name=name, d_state=config.d_state) for name in ("P", "B")}

    @staticmethod
    def frequencies(config: S4Config) -> InitRule:
        return partial(draw_hippo, name="frequencies", d_state=config.d_state)

    @classmethod
    def mixing_flops(cls, d_model: int, config: S4Config, seqlen: int, causal: bool) -> float:
        powers = 2.0 * config.d_state**3 * max(seqlen - 1, 1).bit_length()
        return super().mixing_flops(d_model, config, seqlen, causal) + d_model * powers / seqlen

    def complex_form(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dt lambda, dt^1/2 P and dt B (d_model, d_state / 2), and C (kernels, d_model, d_state / 2), complex64 at
        least."""
        rates = self.rates()
        exact = rates.real.dtype
        dt = self.log_dt.to(exact).exp().unsqueeze(-1)
        P, B, C = (torch.view_as_complex(part.to(exact)) for part in (self.P, self.B, self.C))
        return rates, dt.sqrt() * P, dt * B, C

    @staticmethod
    def solved(rates: Tensor, p: Tensor, b: Tensor) -> Tensor:
        """(1 - dt A / 2)^-1 b for b (..., d_model, d_state / 2)."""
        diagonal = 1 - rates / 2
        share = (p.conj() * b / diagonal).real.sum(-1) / (1 + (p.conj() * p / diagonal).real.sum(-1))
        return (b - p * share.unsqueeze(-1)) / diagonal

    @classmethod
    def moved(cls, rates: Tensor, p: Tensor, x: Tensor) -> Tensor:
        """A' x for x (..., d_model, d_state / 2)."""
        half = x + rates / 2 * x - p * (p.conj() * x).real.sum(-1, keepdim=True)
        return cls.solved(rates, p, half)

    def real_form(self, channels: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """A' (channels, d_state, d_state), B' (channels, d_state, 1) and 2 C (channels, kernels, d_state), for states
        that are their real parts and then their imaginary parts."""
        rates, p, b, C = (part[..., channels, :] for part in self.complex_form())
        unit = torch.eye(rates.shape[-1], dtype=rates.dtype, device=rates.device).unsqueeze(1)
        columns = self.moved(rates, p, torch.cat([unit, 1j * unit]))
        of_states = 2 * torch.cat([C.real, -C.imag], -1)
        return reals(columns).permute(1, 2, 0), reals(self.solved(rates, p, b)).unsqueeze(-1), of_states.transpose(0, 1)

    def kernels(self, length: int, channels: slice = slice(None)) -> Tensor:
        """K (kernels, channels, length): with l = i J + j, rows C A'^(i J) times columns A'^j B'."""
        A, B, C = self.real_form(channels)
        columns, A = krylov(A, B, 1 << (max(length - 1, 1).bit_length() + 1) // 2)
        rows, _ = krylov(A.mT, C.mT, -(-length // columns.shape[-1]))
        found = (rows.mT @ columns).unflatten(1, (-1, C.shape[1]))  # (channels, i, kernels, j)
        return found.permute(2, 0, 1, 3).flatten(-2)[..., :length]

    def matrix(self, x: Tensor) -> Tensor:
        """Toeplitz matrices of the kernels, state by state, plus D on the diagonal, (1, d_model, L, L)."""
        rates, p, b, C = self.complex_form()
        state, taps = self.solved(rates, p, b), []
        for _ in range(x.shape[1]):
            taps.append(2 * (C * state).real.sum(-1))
            state = self.moved(rates, p, state)
        return self.toeplitz(torch.stack(taps, -1))

    @outside_autocast
    def continued(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rates, p, b, C = self.complex_form()
        state = state.to(rates.dtype)
        if x.dim() == 2:
            state = self.moved(rates, p, state) + self.solved(rates, p, b) * x.unsqueeze(-1)
            y = 2 * (C[0] * state).real.sum(-1)
            return y + self.D.to(y.dtype) * x, state
        length, state, outputs = min(x.shape[1], CARRIED), reals(state), []
        A, B, of_states = self.real_form()
        columns, _ = krylov(A, B, length)
        rows, _ = krylov(A.mT, A.mT @ of_states.mT, length)
        kernel = (of_states @ columns).squeeze(1)
        for piece in x.split(length, 1):
            new = piece.shape[1]
            kept = torch.einsum("hnl,bhn->blh", rows[..., :new], state)
            outputs.append(long_convolution(piece, kernel[:, :new]) + kept)
            added = torch.einsum("hnl,blh->bhn", columns[..., :new].flip(-1), piece.to(state.dtype))
            state = torch.einsum("hmn,bhn->bhm", torch.linalg.matrix_power(A, new), state) + added
        y = torch.cat(outputs, 1)
        return y + self.D.to(y.dtype) * x, torch.complex(*state.contiguous().chunk(2, -1))


def reals(x: Tensor) -> Tensor:
    """Complex (..., n) -> real (..., 2 n): real parts, then imaginary parts."""
    return torch.cat([x.real, x.imag], -1)


def krylov(A: Tensor, start: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """start, A start, A^2 start, ... side by side, as many as the least power of two from `count` on, and A to that
    power."""
    width = start.shape[-1]
    while start.shape[-1] < count * width:
        start, A = torch.cat([start, A @ start], -1), A @ A
    return start, A


def draw_hippo(shape: torch.Size, generator: torch.Generator, *, name: str, d_state: int) -> Tensor:
    """The frequencies, P or B of HiPPO-LegS for all channels: its matrix plus P P^T is normal, and its eigenvectors,
    turned such that B is positive, are the coordinates."""
    n = torch.arange(d_state, dtype=torch.float64)
    p, b = (n + 0.5).sqrt(), (2 * n + 1).sqrt()
    skew = (torch.outer(b, b) / 2).triu(1)
    frequencies, vectors = torch.linalg.eigh(1j * (skew.mT - skew).to(torch.complex128))
    frequencies, vectors = frequencies[d_state // 2 :], vectors[:, d_state // 2 :]
    B = vectors.mH @ b.to(vectors.dtype)
    P = (vectors.mH @ p.to(vectors.dtype)) * B.conj() / B.abs()
    found = {"frequencies": frequencies, "P": torch.view_as_real(P), "B": torch.view_as_real(B.abs() + 0j)}[name]
    return found.float().repeat(shape[0] // found.shape[0] if name == "frequencies" else (shape[0], 1, 1))
