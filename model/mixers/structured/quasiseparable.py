"""Quasiseparable matrices in the shared block of the matrix mixers (arXiv 2407.09941): Hydra's mixer with one B and C
for both directions and all heads, for comparison with the other matrices."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import quasiseparable_scan
from matmix.kernels.functions import working
from matmix.kernels.scan_layer.chunked import StepSizes
from matmix.model.calls import weight_of, weights_of
from matmix.model.initialization import InitRule, constant_init
from matmix.model.mixers.scans.scan_block import draw_dt_bias, side_matrices, with_diagonal
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer, SharedBlockConfig, draw_xavier_normal


@dataclass(frozen=True, kw_only=True, slots=True)
class QuasiseparableConfig(SharedBlockConfig):
    """Options of the quasiseparable mixers."""

    d_state: int = 64
    """Width of B and C, which all heads share: the rank of the off-diagonal blocks of M. The papers' code takes
    nheads * qk_dim."""
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""


class Quasiseparable(MatrixMixer):
    """M = tril_strict + triu_strict + diag(D), as in Hydra: token i reads with C_(i-1) (C_(i+1)) the state that the
    tokens before (after) it left, B_j dt_j decayed from j + 1 to i - 1 (i + 1 to j - 1)."""

    Config = QuasiseparableConfig
    rank_option = "d_state"
    not_float8 = ("matrix_mixer.fc_D",)
    not_decayed = ("matrix_mixer.A_log", "matrix_mixer.dt_bias", "matrix_mixer.D")
    data_dependent = True  # the diagonal is, in either form
    skip = False
    knows_documents = True

    def __init__(self, d_model: int, config: QuasiseparableConfig, **options):
        super().__init__(d_model, config, **options)
        self.matrix_mixer.fc_D = nn.Linear(self.d_inner, self.nheads, bias=False)

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        steps = partial(draw_dt_bias, low=self.config.dt_min, high=self.config.dt_max, floor=1e-4)
        heads = (self.nheads,)
        return {"A_log": (heads, constant_init(0.0)), "D": (heads, constant_init(1.0)), "dt_bias": (heads, steps)}

    @classmethod
    def check(cls, d_model: int, config: QuasiseparableConfig) -> None:
        super().check(d_model, config)
        cls.require_steps(config)

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: QuasiseparableConfig, seqlen: int) -> float:
        # Per direction, decay, write and read take 3 multiply-adds per state element.
        return 2.0 * 2 * 3 * d_inner * config.d_state

    def vectors_and_steps(self, v: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """B and C (B, L, d_state), step sizes and log decays (B, L, 2, H) with the directions before the heads."""
        raise NotImplementedError

    def diagonal(self, v: Tensor) -> Tensor:
        """D of every token and head, (B, L, H) in float32 at least: `fc_D` of v plus D."""
        product = working(self.matrix_mixer.fc_D(v.flatten(-2)))
        return product + weight_of(self.matrix_mixer, "D").to(product.dtype)

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        B, C, dt, log_decay = self.vectors_and_steps(v, inputs)
        k, q = (part.unsqueeze(2) for part in (B, C))
        sides = ((q, k, log_decay[..., side, :], dt[..., side, :]) for side in (0, 1))
        below, above = side_matrices(*sides, shift=True)
        return with_diagonal(below + above, self.diagonal(v))

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        B, C, dt, log_decay = self.vectors_and_steps(v, inputs)
        k, q = (part.to(v.dtype).unsqueeze(2) for part in (B, C))
        return quasiseparable_scan(
            v, q, k, q, k, log_decay[..., 0, :], log_decay[..., 1, :], input_scale_forward=dt[..., 0, :],
            input_scale_backward=dt[..., 1, :], diagonal=self.diagonal(v), shift=True, cu_seqlens=cu_seqlens,
            context=self.context,
        )  # fmt: skip


class QuasiseparableDI(Quasiseparable):
    """B and C are parameters (N, 2 d_state), and one step size per head serves all positions and both directions."""

    fixed_length = True

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        shape = (self.max_seqlen, 2 * self.config.d_state)
        return super().mixing_parameters() | {"BC": (shape, draw_xavier_normal)}

    def vectors_and_steps(self, v, inputs):
        batch, length = v.shape[:2]
        BC, dt_bias, A_log = weights_of(self.matrix_mixer, "BC", "dt_bias", "A_log")
        B, C = BC.expand(batch, -1, -1).chunk(2, -1)
        exact = torch.promote_types(v.dtype, torch.float32)
        dt = F.softplus(dt_bias.to(exact))
        log_decay = dt * -A_log.to(exact).exp()
        return B, C, *(part.expand(batch, length, 2, -1) for part in (dt, log_decay))


class QuasiseparableDD(Quasiseparable):
    """B, C and the step sizes of both directions are projected from x."""

    sequence_aligned = True
    direct_inputs = 2

    @classmethod
    def input_widths(cls, nheads: int, config: QuasiseparableConfig) -> tuple[int, ...]:
        return (config.d_state, config.d_state)

    def vectors_and_steps(self, v, inputs):
        B, C, dt = inputs
        parameters = weights_of(self.matrix_mixer, "dt_bias", "A_log")
        dt, log_decay = StepSizes.apply(dt, *parameters, 2, 0.0, float("inf"))
        return B, C, dt, log_decay
