"""Encoder-decoders: layers that see both sides read a source, and causal layers the target behind it, into which they
mix the source with a matrix of T rows and S columns."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.language_model import LanguageModel
from matmix.model.blocks import Block, residual_std
from matmix.model.config import ModelConfig
from matmix.model.initialization import normal_init
from matmix.model.mixers.attention.cross import (
    CrossAttention,
    CrossAttentionConfig,
    CrossLinearAttention,
    CrossLinearAttentionConfig,
)
from matmix.model.norms import block_norm

CROSS = ("softmax", "linear", "none")


@dataclass(frozen=True, slots=True)
class EncoderDecoderOptions:
    """Options of `EncoderDecoder`."""

    cross: str = "softmax"
    """How the target reads the source: softmax or linear attention, or none (a control)."""
    heads: int = 4
    """Heads of the cross mixing."""
    source: str = ""
    """The mixer of the layers over the source; empty = those of `layers`, in their bidirectional form."""
    separator: int = 0
    """Id of the token that each document's target begins with. The default is that of the task reversal."""


@dataclass(eq=False)
class Side:
    """The sources of all documents, or their targets, n positions in all: where they are in the packed row, and as rows
    of one length."""

    places: Tensor
    """int64 (n,), in the packed row."""
    cu_seqlens: Tensor
    """int32, without those that are empty."""
    rows: Tensor
    """int64 (documents, longest), which of the n positions; n for padding."""
    real: Tensor
    """bool (documents, longest), where there is no padding."""

    @classmethod
    def of(cls, mine: Tensor, cu_seqlens: Tensor) -> "Side":
        """mine: bool (N,), of the packed row. cu_seqlens: (documents + 1,), of both sides."""
        before = torch.cat([mine.new_zeros(1, dtype=torch.long), mine.cumsum(0)])[cu_seqlens.long()]
        lengths = before.diff()
        positions = torch.arange(max(1, int(lengths.max())), device=mine.device)
        real = positions < lengths.unsqueeze(1)
        rows = torch.where(real, before[:-1, None] + positions, before[-1])
        return cls(mine.nonzero().squeeze(1), before.unique().int(), rows, real)

    def padded(self, x: Tensor) -> Tensor:
        """(1, n, d_model) -> (documents, longest, d_model), zero in padding."""
        filled = torch.cat([x[0], x.new_zeros(1, x.shape[-1])])
        return filled.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)

    def packed(self, rows: Tensor) -> Tensor:
        """The inverse of `padded`."""
        return rows.flatten(0, 1)[self.real.flatten().nonzero().squeeze(1)].unsqueeze(0)


class SourceBlock(Block):
    """A layer over the sources."""

    def forward(self, x: Tensor, source: Side, target: Side) -> Tensor:
        """The packed row (1, N, d_model), whose targets stay as they are."""
        if not source.places.numel():
            return x
        y = super().forward(x[:, source.places], source.cu_seqlens)
        return x.index_copy(1, source.places, y.to(x.dtype))


class TargetBlock(Block):
    """A layer over the targets: the mixer, cross mixing, the MLP."""

    def __init__(self, config: ModelConfig, index: int, options: EncoderDecoderOptions):
        super().__init__(config, index)
        self.cross = None
        if options.cross == "none":
            return
        self.norm_cross = block_norm(config)
        self.norm_source = block_norm(config) if self.pre else nn.Identity()
        shape = {"nheads": options.heads, "headdim": max(1, config.d_model // options.heads)}
        if options.cross == "softmax":
            self.cross = CrossAttention(config.d_model, config.d_model, CrossAttentionConfig(**shape))
        else:
            self.cross = CrossLinearAttention(config.d_model, config.d_model, CrossLinearAttentionConfig(**shape))
        self.init_rules = {"cross.out_proj.weight": normal_init(residual_std(config))}

    def forward(self, x: Tensor, source: Side, target: Side) -> Tensor:
        """The packed row (1, N, d_model), whose sources stay as they are."""
        if not target.places.numel():
            return x
        y = x[:, target.places]
        if self.mixer is not None:
            y = self.add(y, self.mix(y, target.cu_seqlens), self.norm_mixer)
        if self.cross is not None:
            memory = source.padded(self.norm_source(x[:, source.places]))
            # An empty source is one position of zeros.
            first = torch.arange(source.real.shape[1], device=x.device) == 0
            real = source.real | (first & ~source.real.any(1, keepdim=True))
            read = self.cross(target.padded(self.norm_cross(y) if self.pre else y), memory, real)
            y = self.add(y, target.packed(read), self.norm_cross)
        return x.index_copy(1, target.places, self.after_mixer(y).to(x.dtype))


@register_architecture("encoder_decoder")
class EncoderDecoder(LanguageModel):
    """Reads documents `source, separator, target`, and predicts each token of the target from the whole source and the
    target before it (arXiv 1706.03762).

    There are n_layers layers over the source, then n_layers over the target, which begins with the first separator of
    the document. Features are zero in the source, so that its tokens are predicted from nothing: all are alike.
    """

    Options = EncoderDecoderOptions
    separated = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.given = self.options(config)
        over_source = source_config(config)
        layers = [SourceBlock(over_source, index) for index in range(config.n_layers)]
        layers += [TargetBlock(config, index, self.given) for index in range(config.n_layers)]
        self.blocks = nn.ModuleList(layers)

    @classmethod
    def check(cls, config: Any) -> None:
        options = cls.options(config)
        if options.cross not in CROSS:
            raise ValueError(f"model.options.cross = {options.cross!r}: must be one of {', '.join(CROSS)}")
        if options.heads < 1 or options.separator < 0:
            raise ValueError(
                f"model.options: heads = {options.heads}, separator = {options.separator}: heads must be 1 or more, "
                "the separator the id of a token"
            )
        if fixed := [*config.fixed_length_mixers(), *source_config(config).fixed_length_mixers()]:
            raise ValueError(
                f"{fixed[0]} takes sequences of one length, but sources and targets of an encoder_decoder differ; take "
                "another mixer"
            )

    def embed(self, inputs: Tensor, cu_seqlens: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        if inputs.is_floating_point():
            raise ValueError("an encoder_decoder needs token ids: in embedded tokens it finds no separator")
        return super().embed(inputs, cu_seqlens, token_type_ids)

    def block_inputs(self, inputs: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> tuple[Any, ...]:
        if cu_seqlens is None:
            batch, length = inputs.shape
            cu_seqlens = length * torch.arange(batch + 1, device=inputs.device)
        bounds = cu_seqlens.long()
        found = (inputs.flatten() == self.given.separator).cumsum(0)
        before = torch.cat([found.new_zeros(1), found])[bounds[:-1]]
        behind = found > torch.repeat_interleave(before, bounds.diff(), output_size=found.numel())
        return Side.of(~behind, bounds), Side.of(behind, bounds)

    def run_blocks(
        self, x: Tensor, source: Side, target: Side, streams: list[Tensor] | None = None, carried: None = None
    ) -> Tensor:
        assert carried is None, "no state enters a source"
        x = super().run_blocks(x.flatten(0, 1).unsqueeze(0), source, target, streams=streams)
        return x.index_fill(1, source.places, 0)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> list[Any]:
        raise ValueError("an encoder_decoder reads whole documents: no state goes from one token to the next")


def source_config(config: Any) -> ModelConfig:
    """Returns the configuration of the layers over the source. Raises ValueError (one line) for mixers that do not see
    both sides."""
    source = EncoderDecoder.options(config).source
    layers = (source,) if source else config.layers
    try:
        return dataclasses.replace(config, architecture="encoder", options={}, layers=layers)
    except ValueError as error:
        raise ValueError(f"layers over the source (model.options.source = {source!r}): {error}") from None
