"""One Hydra layer against the published way of computing it and against attention of the same width.

    python -P -m matmix.benchmarks layer

Weights are float32 and products run in bfloat16 under autocast, as in training. The published way takes the weights of
our layer: convolution by conv1d, reversed copies that double the batch, mamba-ssm's SSD, roll, reversal, sum, and
mamba-ssm's gated norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.benchmarks.kernels.norm import mamba_norm
from matmix.benchmarks.kernels.scan import flash_only
from matmix.benchmarks.measuring.command import parser_of, run_command
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.small import BATCH, SEQLEN
from matmix.benchmarks.measuring.suite import Candidate, Case
from matmix.benchmarks.peers.flipped import CausalScan, flipped, mamba_causal, our_causal
from matmix.benchmarks.peers.packages import Missing
from matmix.kernels import gated_norm
from matmix.model import initialize
from matmix.model.mixers import MIXERS
from matmix.model.mixers.scans.hydra import Hydra
from matmix.train.process.node_folders import use_caches

LENGTHS = "128,512,2048,8192,32768,131072"
NormFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, weight, gate) -> rmsnorm(x) weight silu(gate)."""


def published_layer(layer: Hydra, causal: CausalScan, norm: NormFunction) -> Callable[[Tensor], Tensor]:
    """u (batch, seqlen, d_model) -> the same, with the weights of `layer`, as the authors' module goes about it."""
    mix = flipped(causal)
    vectors = (layer.config.ngroups, layer.config.d_state)

    def forward(u: Tensor) -> Tensor:
        widths = [layer.d_inner, layer.d_inner + 4 * layer.d_group, layer.nheads, layer.nheads]
        z, xbc, dt_forward, dt_backward = layer.in_proj(u).split(widths, -1)
        decay = -torch.exp(layer.A_log.float())
        steps = [F.softplus(dt + layer.dt_bias) for dt in (dt_forward, dt_backward)]
        conv = layer.conv1d
        padding = layer.config.d_conv // 2
        xbc = F.conv1d(xbc.transpose(1, 2), conv.weight, conv.bias, padding=padding, groups=conv.groups)
        xbc = F.silu(xbc.transpose(1, 2))
        x, *bc = xbc.split([layer.d_inner, *[layer.d_group] * 4], -1)
        k_forward, q_forward, k_backward, q_backward = (part.unflatten(-1, vectors) for part in bc)
        diagonal = F.linear(x, layer.fc_D.weight, layer.D)
        v = x.unflatten(-1, (layer.nheads, -1))
        y = mix(v, q_forward, k_forward, q_backward, k_backward, *steps, decay, diagonal)
        return layer.out_proj(norm(y.flatten(-2), layer.norm.weight, z))

    return forward


def make_mixer(name: str, settings: Settings, seqlen: int) -> nn.Module:
    """A mixer by itself, initialised, on the device."""
    mixer = MIXERS[name]
    with torch.device(settings.device):
        layer = mixer(settings.d_model, mixer.Config(), causal=False, max_seqlen=seqlen, output_std=0.02)
    initialize(layer, 0)
    return layer


def layer_case(seqlen: int, settings: Settings) -> Case:
    """All candidates at one length."""
    torch.manual_seed(0)
    batch = settings.batch(seqlen)
    shape = (batch, seqlen, settings.d_model)
    u, cotangent = (torch.randn(shape, device=settings.device, dtype=settings.dtype) for _ in range(2))
    u.requires_grad_()
    hydra, attention = make_mixer("hydra", settings, seqlen), make_mixer("attention", settings, seqlen)
    low = settings.dtype != torch.float32

    def candidate(name: str, forward: Callable[[Tensor], Tensor], of: nn.Module = hydra) -> Candidate:
        def run() -> Tensor:
            with torch.autocast(settings.device.type, settings.dtype, enabled=low), flash_only(settings.device):
                return forward(u).to(settings.dtype)

        leaves = [u, *of.parameters()]
        return Candidate(name=name, run=run, leaves=leaves, cotangent=cotangent, compared=of is hydra)

    def published(name: str, make: Callable[[], tuple[CausalScan, NormFunction]]) -> Candidate:
        try:
            return candidate(name, published_layer(hydra, *make()))
        except Missing as missing:
            return Candidate(name=name, missing=str(missing))

    candidates = [candidate("ours", hydra)]
    if settings.compile:
        use_caches()
        candidates.append(candidate("ours, compiled", torch.compile(hydra, dynamic=False)))
    candidates.append(published("published way (mamba-ssm)", lambda: (mamba_causal(), mamba_norm())))
    candidates.append(published("published way, our causal scan", lambda: (our_causal, gated_norm)))
    candidates.append(candidate("attention layer", attention, attention))
    if settings.compile:
        candidates.append(candidate("attention layer, compiled", torch.compile(attention, dynamic=False), attention))
    label = f"length {seqlen:,}, batch {batch:,}"
    return Case(label=label, seqlen=seqlen, batch=batch, candidates=candidates)


def cases(settings: Settings) -> Iterator[Case]:
    """One case per length."""
    for seqlen in settings.lengths:
        yield layer_case(seqlen, settings)


def small_case(settings: Settings) -> Case:
    """16 sequences of 128 tokens."""
    case = layer_case(SEQLEN, dataclasses.replace(settings, tokens=BATCH * SEQLEN, compile=False))
    case.label = f"small: {case.label}"
    return case


def main(arguments: list[str]) -> None:
    """The command."""
    run_command("layer", parser_of("layer", __doc__, LENGTHS).parse_args(arguments), cases, small_case, floors=False)
