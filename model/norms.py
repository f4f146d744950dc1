"""The norms of a model."""

import torch
from torch import Tensor, nn

from matmix.kernels.functions import working
from matmix.model.config import ModelConfig
from matmix.model.initialization import constant_init
from matmix.model.mixers.base import RMSNorm
from matmix.model.positions import mean_of_documents


def make_norm(config: ModelConfig, *, eps: float, bias: bool) -> nn.Module:
    """A norm over d_model of the model's kind; bias: of a LayerNorm."""
    if config.norm_kind == "rms":
        return RMSNorm(config.d_model, eps)
    return nn.LayerNorm(config.d_model, eps=eps, bias=bias)


class InstanceNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance of each channel over the positions of
    its document (arXiv 1607.08022). Of a document of one position nothing is left but the bias."""

    def __init__(self, width: int, *, eps: float, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.init_rules = {"weight": constant_init(1.0)}

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """x (B, L, width), a document a row, or (1, L, width) with documents bounded by `cu_seqlens`; computed in
        float32 at least, in the dtype of x."""
        wide = working(x)
        if cu_seqlens is None:
            variance, mean = torch.var_mean(wide, 1, correction=0, keepdim=True)
            wide = wide - mean
        else:
            lengths = cu_seqlens.diff().long()
            document = torch.repeat_interleave(lengths, output_size=x.shape[1])
            wide = wide - mean_of_documents(wide[0], lengths)[document]
            variance = mean_of_documents(wide[0].square(), lengths)[document]
        y = wide * (variance + self.eps).rsqrt() * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def block_norm(config: ModelConfig) -> nn.Module:
    """A norm in the layers of the model."""
    kind = {"eps": config.norm_eps, "bias": config.norm_bias}
    return InstanceNorm(config.d_model, **kind) if config.norm_kind == "instance" else make_norm(config, **kind)


def normed(norm: nn.Module, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Applies a norm of a layer to the stream (B, L, d_model) of documents."""
    return norm(x, cu_seqlens) if isinstance(norm, InstanceNorm) else norm(x)
