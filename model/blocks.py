"""Residual blocks: a mixer, an MLP, or both, before or after a norm."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.calls import Called
from matmix.model.carrying import LayerStates
from matmix.model.config import ModelConfig
from matmix.model.initialization import constant_init, normal_init
from matmix.model.mixers import MIXERS
from matmix.model.mixers.base import ScanOrders
from matmix.model.mixers.structured.channels import CHANNEL_MAPS
from matmix.model.norms import block_norm, normed


def activate(x: Tensor, name: str) -> Tensor:
    """gelu (exact), gelu_tanh, relu or silu."""
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}[name](x)


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of projections that add to the residual stream.

    In pre-norm models matrix_std / sqrt(number of additions) (GPT-2), so that the stream's variance does not grow
    with the depth; post-norm models normalise after each addition and take matrix_std, as BERT.
    """
    additions = sum((mixer is not None) + has_mlp for mixer, has_mlp in config.layer_kinds())
    return config.matrix_std / math.sqrt(additions) if config.norm == "pre" else config.matrix_std


class MLP(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)); dense maps, or of `config.mlp`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        narrow, wide, std = config.d_model, config.mlp_width, residual_std(config)
        self.activation = config.activation
        if config.mlp == "dense":
            linear = partial(nn.Linear, bias=config.mlp_bias)
            self.init_rules = {"down.weight": normal_init(std)}
        else:
            linear = partial(
                CHANNEL_MAPS[config.mlp], size=config.mlp_size, bias=config.mlp_bias, std=config.matrix_std
            )
        self.up = linear(narrow, wide)
        # A layer of its own, so that optimizers see two matrices.
        self.gate = linear(narrow, wide) if config.mlp_gate else None
        self.down = linear(wide, narrow) if config.mlp == "dense" else linear(wide, narrow, std=std)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activate(self.up(x), self.activation))
        return self.down(activate(self.gate(x), self.activation) * self.up(x))


class LayerScale(nn.Module):
    """A learned factor for each channel (arXiv 2103.17239)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model))
        self.init_rules = {"weight": constant_init(config.layer_scale)}

    def forward(self, y: Tensor) -> Tensor:
        return y * self.weight


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, y (B, ...) is zero for a share `rate` of the rows, and larger
    for the others, so that its mean is kept."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, y: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return y
        kept = torch.rand(y.shape[0], *[1] * (y.dim() - 1), device=y.device) >= self.rate
        return y * (kept / (1 - self.rate)).to(y.dtype)


class Block(Called):
    """Layer `index` of a model: x (B, L, d_model) -> (B, L, d_model)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        mixer, has_mlp = config.layer_kinds()[index]
        self.pre = config.norm == "pre"
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(config.drop_path * index / max(config.n_layers - 1, 1))
        self.mixer = self.mlp = None
        scale = partial(LayerScale, config) if config.layer_scale else nn.Identity
        if mixer is not None:
            self.norm_mixer = block_norm(config)
            form = {"causal": config.mixer_is_causal(mixer), "max_seqlen": config.longest}
            options = config.mixer_config(mixer)
            self.mixer = MIXERS[mixer](config.d_model, options, output_std=residual_std(config), **form)
            self.scale_mixer = scale()
        if has_mlp:
            self.norm_mlp = block_norm(config)
            self.mlp = MLP(config)
            self.scale_mlp = scale()

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, *inputs: Any) -> Tensor:
        """inputs: the further ones of `mix`."""
        if self.mixer is not None:
            x = self.add(x, self.mix(x, cu_seqlens, *inputs), self.norm_mixer)
        return self.after_mixer(x, cu_seqlens)

    def mix(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        orders: ScanOrders | None = None,
        carried: LayerStates | None = None,
    ) -> Tensor:
        """Returns what the mixer adds to the stream x (B, L, d_model), read in `orders` where they are given, or going
        on from states that are `carried`."""
        x = normed(self.norm_mixer, x, cu_seqlens) if self.pre else x
        if carried is not None:
            fresh = self.mixer.initial_state(cu_seqlens.numel(), x.device)
            y, states = self.mixer(x, carried.of_documents(fresh), cu_seqlens, method="forward_with_state")
            carried.leave(states)
            return self.scale_mixer(y)
        if orders is None:
            return self.scale_mixer(self.mixer(x, cu_seqlens, max_seqlen))
        return self.scale_mixer(self.mixer(x, orders, method="forward_in_orders"))

    def matrix(self, x: Tensor) -> Tensor:
        """The mixer's matrix (B, H, L, L) for the stream x (B, L, d_model), one document a row."""
        return self.mixer(self.norm_mixer(x) if self.pre else x, method="matrix")

    def after_mixer(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """The MLP half."""
        if self.mlp is None:
            return x
        y = normed(self.norm_mlp, x, cu_seqlens) if self.pre else x
        return self.add(x, self.scale_mlp(self.mlp(y)), self.norm_mlp)

    def add(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """Add y to the stream, and normalise the sum in post-norm models."""
        x = x + self.drop_path(self.dropout(y))
        return x if self.pre else norm(x)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Any:
        """The mixer's state before the first token, on `device`; None for a layer without a mixer."""
        return None if self.mixer is None else self.mixer.initial_state(batch_size, device)

    def step_in_place(self, x: Tensor, state: Any) -> Tensor:
        """`step` whose new state takes the memory of the given one."""
        if self.mixer is not None:
            y = self.mixer(self.norm_mixer(x) if self.pre else x, state, method="step_in_place")
            x = self.add(x, self.scale_mixer(y), self.norm_mixer)
        return self.after_mixer(x)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token: x (B, d_model)."""
        return self.forward_with_state(x, state, by="step")

    def forward_with_state(self, x: Tensor, state: Any, by: str = "forward_with_state") -> tuple[Tensor, Any]:
        """Continue from a state over x (B, L, d_model); by: the mixer's method."""
        if self.mixer is not None:
            y, state = self.mixer(self.norm_mixer(x) if self.pre else x, state, method=by)
            x = self.add(x, self.scale_mixer(y), self.norm_mixer)
        return self.after_mixer(x), state
