"""H3 (arXiv 2212.14052): a state-space model between two gates, one of which looks at earlier tokens."""

from dataclasses import dataclass

from torch import Tensor, nn

from matmix.model.mixers.base import ShortConv, convolve, zero_state
from matmix.model.mixers.convolutions.s4d import S4D, S4DConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class H3Config(S4DConfig):
    """Options of H3."""

    d_conv: int = 4
    """Taps of the convolution of the keys (2 to 9), which stands for the shift matrix of the paper."""


class H3(S4D):
    """out_proj(q * S(shift(k) * v)), S an S4D with its term D, shift a short convolution: for each channel
    M = diag(q) (T + D) diag(shift(k))."""

    Config = H3Config
    bidirectional_form = False
    data_dependent = sequence_aligned = True

    def __init__(self, d_model: int, config: H3Config, **options):
        super().__init__(d_model, config, **options)
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=config.bias)
        self.conv1d = ShortConv(d_model, config.d_conv, bias=True)
        self.out_proj = nn.Linear(d_model, d_model, bias=config.bias)

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": 3 * (self.d_model,)}

    @classmethod
    def check(cls, d_model: int, config: H3Config) -> None:
        super().check(d_model, config)
        cls.require(config.d_conv in range(2, 10), config, "d_conv", "must be from 2 to 9")

    @classmethod
    def mixing_flops(cls, d_model: int, config: H3Config, seqlen: int, causal: bool) -> float:
        return super().mixing_flops(d_model, config, seqlen, causal) + 2 * d_model

    def parts(
        self, x: Tensor, window: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, shift(k) and v (..., d_model), and the window of `convolve`."""
        q, k, v = self.in_proj(x).chunk(3, -1)
        options = {"causal": True, "cu_seqlens": cu_seqlens, "context": self.context}
        k, window = convolve(self.conv1d, k.contiguous(), window, **options)
        return q, k, v, window

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        if cu_seqlens is not None and x.shape[1] == 0:
            return x  # the short convolution takes no empty rows
        q, k, v, _ = self.parts(x, cu_seqlens=cu_seqlens)
        return self.out_proj(q * self.mixed(k * v, cu_seqlens).to(q.dtype))

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _, _ = self.parts(x)
        return q.mT.unsqueeze(-1) * super().matrix(x) * k.mT.unsqueeze(-2)

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x)[2].unsqueeze(-1)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(mixed.squeeze(-1))

    def initial_state(self, batch_size: int, device=None) -> tuple[Tensor, Tensor]:
        """The last keys, zeros (batch_size, d_model, d_conv - 1), and the state of the S4D."""
        window = zero_state(self.conv1d, device, batch_size, self.d_model, self.config.d_conv - 1)
        return window, super().initial_state(batch_size, device)

    def forward_with_state(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v, window = self.parts(x, state[0])
        y, ssm = self.continued(k * v, state[1])
        return self.out_proj(q * y.to(q.dtype)), (window, ssm)

    step = forward_with_state
