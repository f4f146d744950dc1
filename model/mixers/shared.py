"""Functions that several kinds of mixers use: numbers of heads, gates between tokens, the weight of a norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from matmix.kernels.functions import outside_autocast
from matmix.model.calls import is_quantised, weights_of
from matmix.model.initialization import constant_init


def head_count(d_model: int, config: Any) -> int:
    """The number of heads: config.nheads, where 0 stands for d_model / headdim."""
    return config.nheads or d_model // config.headdim


def check_heads(mixer: str, d_model: int, config: Any) -> None:
    """Raise a one-line ValueError where heads do not fit the width. mixer: its name in a configuration."""
    for name, least in (("headdim", 1), ("nheads", 0)):
        if getattr(config, name) < least:
            raise ValueError(f"model.mixers.{mixer}.{name} = {getattr(config, name)}: must be {least} or more")
    if config.nheads == 0 and d_model % config.headdim:
        raise ValueError(
            f"model.mixers.{mixer}.headdim = {config.headdim} does not divide d_model = {d_model}; "
            "change headdim, or give nheads"
        )


class RMSNormWeight(nn.Module):
    """The weight of a gated RMSNorm; the op itself is `kernels.gated_norm`."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.init_rules = {"weight": constant_init(1.0)}


def conv_weights(conv: nn.Conv1d) -> tuple[Tensor, Tensor | None]:
    """Weight (channels, taps) and bias of a depthwise convolution that an operation of `kernels` computes."""
    weight, bias = weights_of(conv, "weight", "bias")
    return weight.squeeze(1), bias


def state_like(layer: nn.Module, device: torch.device | None) -> Tensor:
    """An empty tensor to make states like, of the type of the weights of `layer` and on `device`; None = on theirs.
    float32 where they are quantised, and have no type that numbers could be computed in. A plain one where they are of
    a class of their own, which may make no others."""
    if is_quantised(layer):
        return torch.empty(0, device=device)
    weight = layer.weight
    return torch.empty(0, dtype=weight.dtype, device=weight.device if device is None else device)


@outside_autocast
def exact_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """x W^T + b in float32 at least, also under autocast: what the logits of gates need."""
    exact = torch.promote_types(x.dtype, torch.float32)
    if type(layer) is not nn.Linear:  # an adapter or quantised, and more than its weight
        wide = {name: w.to(exact) for name, w in layer.named_parameters() if w.is_floating_point()}
        return functional_call(layer, wide, (x.to(exact),)).to(exact)
    weight, bias = weights_of(layer, "weight", "bias")
    return F.linear(x.to(exact), weight.to(exact), None if bias is None else bias.to(exact))


def gate_sums(log_gate: Tensor, length: int) -> Tensor:
    """Sums over k = j + 1 .. i of log_gate[k] for i > j, else 0: (B, L, H) or (H,) -> (B or 1, H, L, L).

    log_gate: logarithms of gates from (0, 1]; a gate of 0 is taken as e^-10,000, which is 0 as well.
    Differences of cumulative sums: taken in float64, as in float32 they cancel once a few gates are nearly closed.
    (Sums along one side of a square take four times as long on a CPU.)
    """
    if log_gate.dim() == 1:
        position = torch.arange(length, device=log_gate.device)
        distance = (position[:, None] - position).clamp(min=0)
        return (log_gate[:, None, None] * distance).unsqueeze(0)
    sums = log_gate.transpose(1, 2).double().clamp(min=-1e4).cumsum(-1)
    # Minus before the square is made, not after: so it is in the backward pass as well.
    return (sums.unsqueeze(-1) + sums.neg().unsqueeze(-2)).to(log_gate.dtype).tril(-1)
