"""`norm`: the gated RMSNorm that ends a Hydra layer, over tokens; every row is a token of d_inner channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from matmix.benchmarks.kernels.scan import EXPAND
from matmix.benchmarks.measuring.command import parser_of, run_command
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.suite import Candidate, Case, on_leaves
from matmix.benchmarks.peers.packages import Missing, peer
from matmix.kernels import gated_norm

EPS = 1e-5


def ours(backend: str = "auto") -> Callable[..., Tensor]:
    """Our op."""
    return lambda x, weight, gate: gated_norm(x, weight, gate, eps=EPS, backend=backend)


def plain(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """One line of PyTorch."""
    return rms_norm(x, x.shape[-1:], weight, EPS) * silu(gate)


def mamba_norm() -> Callable[..., Tensor]:
    """mamba-ssm's norm, which the published layer uses. Raises `Missing`."""
    norm = peer("mamba-ssm", "mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    return lambda x, weight, gate: norm(x, weight, None, z=gate, eps=EPS, norm_before_gate=True)


def fla_norm() -> Callable[..., Tensor]:
    """flash-linear-attention's. Raises `Missing`. (Liger's kernels have no gated norm.)"""
    norm = peer("fla-core", "fla.modules.norm.fused_norm_gate", "rms_norm_gated")
    return lambda x, weight, gate: norm(x, gate, weight, None, activation="swish", eps=EPS)


def norm_case(tokens: int, settings: Settings) -> Case:
    """All candidates on so many rows."""
    torch.manual_seed(0)
    channels = EXPAND * settings.d_model
    like = {"device": settings.device, "dtype": settings.dtype}
    x, gate, cotangent = (torch.randn(tokens, channels, **like) for _ in range(3))
    weight = 1 + 0.1 * torch.randn(channels, **like)
    leaves = [t.requires_grad_() for t in (x, weight, gate)]
    candidates = [on_leaves("ours", ours(), leaves, cotangent)]
    if settings.device.type == "cuda":
        candidates.append(on_leaves("ours, PyTorch form", ours("torch"), leaves, cotangent))
    candidates.append(on_leaves("rms_norm * silu", plain, leaves, cotangent))
    if settings.compile:
        compiled = torch.compile(plain, dynamic=False)
        candidates.append(on_leaves("rms_norm * silu compiled", compiled, leaves, cotangent))
    for name, make in (("mamba-ssm (published)", mamba_norm), ("flash-linear-attention", fla_norm)):
        try:
            candidates.append(on_leaves(name, make(), leaves, cotangent))
        except Missing as missing:
            candidates.append(Candidate(name=name, missing=str(missing)))
    return Case(label=f"{tokens:,} rows of {channels:,}", seqlen=tokens, batch=1, candidates=candidates)


def cases(settings: Settings) -> Iterator[Case]:
    """As many rows as a case of each length has tokens: a norm knows no sequences, so the lengths are rows."""
    for rows in settings.lengths:
        yield norm_case(rows, settings)


def main(arguments: list[str]) -> None:
    """The command."""
    run_command("norm", parser_of("norm", __doc__).parse_args(arguments), cases)
