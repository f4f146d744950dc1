"""Two architectures that read and predict float sequences, as docs/adding-an-architecture.md has them."""

from dataclasses import dataclass

import torch
from torch import nn

from matmix.model import register_architecture
from matmix.model.backbone import Backbone, final_norm


@dataclass(frozen=True, slots=True)
class SeriesOptions:
    channels: int = 1
    """Values at each step."""


@register_architecture("series_model:SeriesModel")
class SeriesModel(Backbone):
    """Values (B, L, channels) -> values (B, L, channels), from earlier steps only."""

    causal = True
    inputs = "values"
    Options = SeriesOptions

    def __init__(self, config):
        super().__init__(config)
        channels = self.options(config).channels
        self.embedding = nn.Linear(channels, config.d_model)
        self.norm = final_norm(config)
        self.output = nn.Linear(config.d_model, channels)

    @classmethod
    def example_inputs(cls, config, batch_size, seqlen):
        return torch.zeros(batch_size, seqlen, cls.options(config).channels)

    @classmethod
    def input_flops(cls, config):
        return 2.0 * cls.options(config).channels * config.d_model

    output_flops = input_flops

    def embed(self, inputs, cu_seqlens=None):
        return self.embedding(inputs)

    def features(self, x):
        return self.norm(x)

    def output_projection(self):
        return self.output.weight, self.output.bias


@register_architecture("series_model:SeriesFiller")
class SeriesFiller(SeriesModel):
    """The same from both sides, to fill in missing values."""

    causal = False
