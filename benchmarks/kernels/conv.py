"""`conv`: the short convolution with SiLU as Hydra uses it, and once as the causal_conv1d package can do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from matmix.benchmarks.kernels.scan import D_STATE, EXPAND, GROUPS
from matmix.benchmarks.measuring.command import parser_of, run_command
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.suite import Candidate, Case, on_leaves
from matmix.benchmarks.peers.packages import Missing, peer
from matmix.kernels import short_conv

HYDRA_WIDTH, CAUSAL_WIDTH = 7, 4


def ours(causal: bool, backend: str = "auto") -> Callable[..., Tensor]:
    """Our op."""
    return lambda x, weight, bias: short_conv(x, weight, bias, causal=causal, activation="silu", backend=backend)


def plain(causal: bool) -> Callable[..., Tensor]:
    """conv1d over channels-first views, then SiLU: what the published layer does."""

    def conv_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        channels, width = weight.shape
        padding = width - 1 if causal else width // 2
        y = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=padding, groups=channels)
        return silu(y[..., : x.shape[1]]).transpose(1, 2)

    return conv_silu


def causal_conv1d() -> Callable[..., Tensor]:
    """The package's kernel: causal, 2 to 4 wide. Raises `Missing`."""
    run = peer("causal-conv1d", "causal_conv1d", "causal_conv1d_fn")
    return lambda x, weight, bias: run(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)


def conv_case(seqlen: int, causal: bool, settings: Settings) -> Case:
    """The centred width 7 of Hydra, or the causal width 4 of Mamba, over all channels that Hydra convolves."""
    torch.manual_seed(0)
    batch, width = settings.batch(seqlen), CAUSAL_WIDTH if causal else HYDRA_WIDTH
    channels = EXPAND * settings.d_model + 4 * GROUPS * D_STATE
    like = {"device": settings.device, "dtype": settings.dtype}
    x, cotangent = (torch.randn(batch, seqlen, channels, **like) for _ in range(2))
    weight, bias = torch.randn(channels, width, **like) * width**-0.5, torch.randn(channels, **like)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    candidates = [on_leaves("ours", ours(causal), leaves, cotangent)]
    if settings.device.type == "cuda":
        candidates.append(on_leaves("ours, PyTorch form", ours(causal, "torch"), leaves, cotangent))
    candidates.append(on_leaves("conv1d + silu", plain(causal), leaves, cotangent))
    if settings.compile:
        compiled = torch.compile(plain(causal), dynamic=False)
        candidates.append(on_leaves("conv1d + silu compiled", compiled, leaves, cotangent))
    if causal:
        try:
            candidates.append(on_leaves("causal_conv1d", causal_conv1d(), leaves, cotangent))
        except Missing as missing:
            candidates.append(Candidate(name="causal_conv1d", missing=str(missing)))
    kind = f"{'causal' if causal else 'centred'}, width {width}"
    label = f"{kind}, L {seqlen:,}, B {batch:,}"
    return Case(label=label, kind=kind, seqlen=seqlen, batch=batch, candidates=candidates)


def cases(settings: Settings) -> Iterator[Case]:
    """Both kinds at every length."""
    for causal in (False, True):
        for seqlen in settings.lengths:
            yield conv_case(seqlen, causal, settings)


def main(arguments: list[str]) -> None:
    """The command."""
    run_command("conv", parser_of("conv", __doc__).parse_args(arguments), cases)
