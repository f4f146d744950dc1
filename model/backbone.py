"""The base class of all architectures: it packs padded inputs, runs the blocks and applies the output projection."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels.context import Context
from matmix.kernels.functions import working
from matmix.model.architecture import Architecture
from matmix.model.blocks import Block
from matmix.model.calls import Called, is_quantised
from matmix.model.carrying import CarriedRows, LayerStates
from matmix.model.config import ModelConfig
from matmix.model.mixers import MIXERS
from matmix.model.norms import make_norm
from matmix.model.positions import in_one_row, unpad_indices


def final_norm(config: ModelConfig) -> nn.Module:
    """Returns the layer before the output: a norm in pre-norm models with `final_norm`, else the identity."""
    if config.norm == "pre" and config.final_norm:
        return make_norm(config, eps=config.final_norm_eps, bias=config.norm_bias)
    return nn.Identity()


def embedding_norm(config: ModelConfig) -> nn.Module:
    """Returns the layer behind the embeddings of tokens: a norm as those in the layers, or the identity. (An encoder's
    with biases is its own.)"""
    if config.embedding_norm == "layers":
        return make_norm(config, eps=config.embedding_norm_eps, bias=config.norm_bias)
    return nn.Identity()


def check_context(config: ModelConfig) -> None:
    """Raises ValueError (one line) for a model that cannot work on parts of rows while other ranks hold the others."""
    kind = config.model_class
    reasons = {
        "reads whole sources": kind.separated,
        "reads documents from both ends": kind.strands > 1,
        "has one output for each document": kind.per_document,
        "reads whole images": kind.inputs == "images",
        "normalises over whole documents (model.norm_kind)": config.norm_kind == "instance",
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        raise ValueError(f"engine.context: {config.architecture} {why}; set it to 1")
    for name in dict.fromkeys(mixer for mixer, _ in config.layer_kinds() if mixer is not None):
        if why := MIXERS[name].why_no_context(config.mixer_config(name), config.mixer_is_causal(name)):
            raise ValueError(f"engine.context: {name} {why}; set it to 1, or take another mixer")


class Backbone(Called, Architecture):
    """Inputs -> embeddings -> blocks -> features -> outputs, by `embed`, `features` and `output_projection`."""

    context: Context | None = None
    """The ranks that rows are cut over; None = whole rows."""

    readout_norm: ClassVar[str | None] = None
    """The name of the layer, a norm or the identity, whose output goes to the output projection and nowhere else."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if self.inputs == "tokens" and config.vocab_size < 1:
            raise ValueError("model.vocab_size is not set: give it, or take it from the data")
        self.config = config
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))

    def embed(self, inputs: Tensor, cu_seqlens: Tensor | None = None, **more: Tensor) -> Tensor:
        """Inputs (B, L, ...), such as token ids (B, L) or values (B, L, channels), -> the residual stream
        (B, L, d_model). With cu_seqlens, B is 1 and holds several documents. more: further inputs of `forward`."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Maps the residual stream to the features that the output projection is applied to, of the same shape."""
        raise NotImplementedError

    def pool(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Maps the residual stream (n, d_model) of documents that stand one after the other, of `lengths` (ndocs,)
        int64, which may be 0, to one row for each, (ndocs, d_model). Called where `per_document` is true."""
        raise NotImplementedError

    def output_projection(self) -> tuple[Tensor | None, Tensor | None]:
        """weight (outputs, d_model) and bias (outputs,) or None of the output projection; token models have vocab_size
        outputs. Without a weight the features are the outputs."""
        raise NotImplementedError

    def output_layer(self) -> nn.Module | None:
        """The layer whose weight and bias `output_projection` gives; None where these are of other layers, too."""
        return None

    def project(self, x: Tensor) -> Tensor:
        """The outputs (..., outputs) of features (..., d_model), on the device of the projection."""
        layer = self.output_layer()
        if layer is not None and is_quantised(layer):
            return self.capped(layer(x))
        weight, bias = self.output_projection()
        if weight is None:
            return x
        return self.capped(F.linear(x.to(weight.device), weight, None if bias is None else bias.to(weight.device)))

    @property
    def softcap(self) -> float:
        """The bound of the logits of tokens; 0 where there is none, as in models of other outputs."""
        return self.config.logit_softcap if self.inputs == "tokens" and not self.takes_head else 0.0

    def capped(self, logits: Tensor) -> Tensor:
        """softcap tanh(logits / softcap), computed in float32 at least, in the dtype of the logits."""
        return (self.softcap * (working(logits) / self.softcap).tanh()).to(logits.dtype) if self.softcap else logits

    def forward(
        self,
        inputs: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_seqlen: int | None = None,
        select: Tensor | None = None,
        readout: Callable[..., Any] | None = None,
        streams: list[Tensor] | None = None,
        carried: CarriedRows | None = None,
        **more: Tensor | None,
    ) -> Any:
        """The outputs, or whatever `readout` makes of the features.

        Args:
            inputs: (B, L, ...): token ids (B, L) int64, or what else the architecture reads. Architectures of tokens
                also read what their word embedding gives for them, (B, L, d_model).
            cu_seqlens: (ndocs + 1,) int32, document boundaries in the flattened batch of B * L positions.
            attention_mask: (B, L), nonzero where a position is real. Padding is left out at the entry; where it
                was, the features are zero. Without padding it is as if it were not given. Not together with
                cu_seqlens.
            max_seqlen: length of the longest document, if known; saves finding it.
            select: (n,) int64 positions in the flattened batch; only their features go on to the output. Of no
                meaning where there is one output for each document.
            readout: called as readout(features (n, d_model), weight (outputs, d_model), bias or None) in
                place of the output projection, inside this forward, where sharded weights are whole; with the keyword
                softcap where logits are capped.
            streams: a list that the residual streams (B, L, d_model) before the first block and after each are added
                to; zero where padding was.
            carried: the states with which rows go on, in causal models; they become those behind these rows. With
                cu_seqlens only.
            more: further inputs (B, L, ...) that the architecture knows by name; None = not given. The encoder takes
                token_type_ids (B, L) int64.
        Returns: readout's value; else outputs (n, outputs) with `select`, (B, L, outputs) without. Where there is one
            output for each document, (ndocs, outputs): a document is what cu_seqlens bounds, or a row.
        """
        batch, length = inputs.shape[:2]
        more = {name: value for name, value in more.items() if value is not None}
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("give the model cu_seqlens or attention_mask, not both")
        indices = None
        lengths = None  # of every document, (ndocs,) int64
        if self.per_document and cu_seqlens is not None:
            lengths = cu_seqlens.diff().long()
        elif self.per_document and attention_mask is not None:
            lengths = attention_mask.bool().sum(1)
        elif self.per_document:
            lengths = torch.full((batch,), length, device=inputs.device)
        if attention_mask is not None:
            real, boundaries, longest = unpad_indices(attention_mask)
            # Full rows stay rows, which mixers of a fixed length take too.
            if real.numel() < batch * length:
                indices, cu_seqlens, max_seqlen = real, boundaries, longest
        if cu_seqlens is not None:
            # From here on one row of documents, one after the other.
            inputs = in_one_row(inputs, indices)
            more = {name: in_one_row(value, indices) for name, value in more.items()}

        def in_place(x: Tensor) -> Tensor:
            x = x.flatten(0, 1).to(inputs.device)  # blocks may be on several devices
            return x if indices is None else x.new_zeros(batch * length, x.shape[1]).index_copy(0, indices, x)

        packed: list[Tensor] | None = None if streams is None else []
        layers = carried and carried.of_layers(len(self.blocks), cu_seqlens, batch * length, self.context)
        x = self.embed(inputs, cu_seqlens, **more)
        of_blocks = self.block_inputs(inputs, cu_seqlens, max_seqlen)
        x = self.run_blocks(x, *of_blocks, streams=packed, carried=layers)
        if carried is not None:
            carried.take(layers, self.context)
        if streams is not None:
            streams += (in_place(stream).unflatten(0, (batch, length)) for stream in packed)
        x = in_place(x) if lengths is None else self.pool(x.flatten(0, 1).to(inputs.device), lengths)
        if select is not None and lengths is None:
            x = x[select]
        x = self.features(x)
        if readout is not None:
            capped = {"softcap": self.softcap} if self.softcap else {}
            return readout(x, *self.output_projection(), **capped)
        outputs = self.project(x)
        return outputs if self.per_document or select is not None else outputs.unflatten(0, (batch, length))

    def block_inputs(self, inputs: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> tuple[Any, ...]:
        """Returns what each block is given besides the stream."""
        return cu_seqlens, max_seqlen

    def run_blocks(
        self,
        x: Tensor,
        *arguments: Any,
        streams: list[Tensor] | None = None,
        carried: list[LayerStates] | None = None,
    ) -> Tensor:
        """The residual stream behind the last block, from that before the first. arguments: of each block besides;
        streams: a list that the streams before the first block and after each are added to; carried: the states of each
        block."""
        for index, block in enumerate(self.blocks):
            if streams is not None:
                streams.append(x)
            x = block(x, *arguments, *(() if carried is None else (None, carried[index])))
        if streams is not None:
            streams.append(x)
        return x

    def cut_rows(self, context: Context) -> None:
        """From now on the model is given parts of rows that the ranks of `context` share, with `cu_seqlens`. Raises
        ValueError (one line) for a mixer that cannot mix those."""
        check_context(self.config)
        self.context = context
        for block in self.blocks:
            if block.mixer is not None:
                block.mixer.context = context

    def monitor(self) -> dict[str, Tensor]:
        """Scalars of the last forward pass to watch in training, such as the norms of MRU states, by layer."""
        return {
            f"blocks.{index}.{name}": value
            for index, block in enumerate(self.blocks)
            if block.mixer is not None
            for name, value in block.mixer.monitor().items()
        }
