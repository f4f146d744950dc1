"""The last layers of classifiers: what makes features and logits of the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from matmix.model.config import ModelConfig


class ClassifierHead(nn.Module):
    """dense -> tanh -> dropout, or dropout alone (`hidden = false`), and the last linear layer `output`, which the
    caller applies."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.head.hidden:
            self.dense = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.head.dropout)
        self.output = nn.Linear(config.d_model, config.head.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., d_model) -> what `output` is applied to, of the same shape."""
        if hasattr(self, "dense"):
            x = torch.tanh(self.dense(x))
        return self.dropout(x)


def classifier_flops(config: Any) -> float:
    """Forward floating-point operations of a classifier's head for one output."""
    return 2.0 * config.d_model * (config.head.count + config.head.hidden * config.d_model)
