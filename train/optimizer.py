"""AdamW with decay groups."""

from __future__ import annotations

import torch
from torch import nn

from matmix.train.config import OptimizerConfig

# Parameters whose value is a rate, a frequency or a state, not a weight: shrinking them towards 0 has no meaning.
NEVER_DECAYED = frozenset({"A_log", "dt_bias", "D", "init_states", "q_bias", "k_bias"})


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: matrices and embeddings yes; norms, biases, A_log, dt_bias, D and the network that
    makes Hyena's filter no: it is a function of the offset, and smaller weights are another function."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor and the true shape here
    *modules, last = name.split(".")
    return len(shape) >= 2 and last not in NEVER_DECAYED and "filter" not in modules


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `model`, sharded or not; fused where the device allows it."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decay = config.weight_decay / config.lr if config.fully_decoupled else config.weight_decay
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
