"""Encoders of DNA that read both strands alike: the reverse complement of the input gives that of the output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from matmix.model.architecture import register_architecture
from matmix.model.architectures.encoder import Encoder
from matmix.model.calls import matrix_of, weight_of
from matmix.model.config import ModelConfig
from matmix.model.positions import mirrored_places


@dataclass(frozen=True, slots=True)
class StrandOptions:
    """Options of `StrandEncoder`."""

    complements: str = "0-3 1-2 7-8 9-10"
    """Pairs of token ids that are each other's complement; every other token is its own. The default is that of `matmix
    prepare --tokenizer dna`: A-T and C-G, and what begins a document with what ends it, so that a document between two
    special tokens is turned into one again. For dna-cased: "0-3 1-2 5-8 6-7 12-13 14-15"."""


@register_architecture("strand_encoder")
class StrandEncoder(Encoder):
    """An encoder that shares its parameters between the strands, as Caduceus-PS does (arXiv 2403.03234).

    Blocks read each document and its reverse complement, separately and with the same weights. The residual stream
    (B, L, 2 d_model) holds both, the second one turned back, so that both halves of a position are of the same base
    pair. The output matrix reads the second half with complementary tokens swapped: logits = W f + W' f', which the
    reverse complement of the input turns into their own. This holds for every mixer.
    """

    Options = StrandOptions
    strands = 2

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.pairs = pairs_of(config)

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        pairs_of(config)

    def complement(self, ids: Tensor) -> Tensor:
        """Token ids -> those of the other strand, in the same order."""
        found = ids
        for one, other in self.pairs:  # without a table, which would be a buffer to keep and to move
            found = torch.where(ids == one, other, torch.where(ids == other, one, found))
        return found

    def embed(self, inputs: Tensor, cu_seqlens: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        if inputs.is_floating_point():
            raise ValueError("a strand_encoder needs token ids: of embedded tokens it knows no complement")
        first = self.embeddings(inputs, token_type_ids, cu_seqlens)
        if token_type_ids is not None:
            token_type_ids = self.turned(token_type_ids, cu_seqlens)
        second = self.embeddings(self.turned(self.complement(inputs), cu_seqlens), token_type_ids, cu_seqlens)
        return torch.cat([first, self.turned(second, cu_seqlens)], -1)

    @staticmethod
    def turned(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """x (B, L, ...) with the positions of each document in the opposite order."""
        return x.flip(1) if cu_seqlens is None else x[:, mirrored_places(x.shape[1], cu_seqlens, x.device)]

    def run_blocks(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        streams: list[Tensor] | None = None,
        carried: None = None,
    ) -> Tensor:
        assert carried is None, "states are carried in causal models only"
        # Two documents for each: as rows, or behind the others in the one row.
        side = 0 if cu_seqlens is None else 1
        first, second = x.chunk(2, -1)
        both = torch.cat([first, self.turned(second, cu_seqlens)], side)
        if cu_seqlens is not None:
            cu_both = torch.cat([cu_seqlens, cu_seqlens[1:] + x.shape[1]])
        inner: list[Tensor] | None = None if streams is None else []
        both = super().run_blocks(both, None if cu_seqlens is None else cu_both, max_seqlen, streams=inner)

        def together(both: Tensor) -> Tensor:
            first, second = both.chunk(2, side)
            return torch.cat([first, self.turned(second, cu_seqlens)], -1)

        if streams is not None:
            streams += map(together, inner)
        return together(both)

    def features(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([super(StrandEncoder, self).features(half) for half in (first, second)], -1)

    def output_projection(self) -> tuple[Tensor | None, Tensor | None]:
        weight = matrix_of(self.embeddings.word) if self.config.tie_embeddings else weight_of(self.output)
        bias = weight_of(self.head, "bias")
        swapped = self.complement(torch.arange(weight.shape[0], device=weight.device))
        return torch.cat([weight, weight[swapped]], -1), bias + bias[swapped]

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return 2 * super().output_flops(config)


def pairs_of(config: Any) -> list[tuple[int, int]]:
    """Returns the pairs of ids of a `StrandEncoder`. Raises ValueError (one line) where they make no sense."""
    text = StrandEncoder.options(config).complements
    pairs = [tuple(pair.split("-")) for pair in text.split()]
    if not all(len(pair) == 2 and all(part.isdecimal() for part in pair) for pair in pairs):
        raise ValueError(f'model.options.complements = {text!r}: write pairs of token ids, such as "0-3 1-2"')
    ids = [int(part) for pair in pairs for part in pair]
    if len(set(ids)) < len(ids):
        raise ValueError(f"model.options.complements = {text!r}: names an id twice")
    if config.vocab_size and max(ids, default=0) >= config.vocab_size:
        raise ValueError(f"model.options.complements = {text!r}: the vocabulary has {config.vocab_size:,} ids only")
    return [(int(one), int(other)) for one, other in pairs]
