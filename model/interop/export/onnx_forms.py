"""Models of texts in forms that ONNX can express, for texts of any length.

The fast algorithms choose blocks by the length, write in place and read boundaries of documents. Here each mixer is its
definition instead, `combine(mix(matrix(x), values(x)), x)`, whose matrices take memory that grows with the square of
the length; the MRU's states are products by doubling, which does not.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.backbone import Backbone
from matmix.model.interop.export.onnx_constructions import state_matrices_form
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.mru import MRU


class MatrixForm(nn.Module):
    """A mixer by its matrix."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, cu_seqlens: None = None, max_seqlen: None = None) -> Tensor:
        """x (B, L, d_model) -> same shape."""
        return self.mixer.combine(self.mixer.mix(self.mixer.matrix(x), self.mixer.values(x)), x)


class DoublingForm(nn.Module):
    """An MRU whose states are made in log2(longest) rounds: after round k a state is the product of the matrices of its
    own token and the 2^k - 1 before it."""

    positions: Tensor

    def __init__(self, mixer: MRU, longest: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.rounds = max(longest - 1, 0).bit_length()
        # Looked up, so that a longer text is an error and no state that lacks its beginning.
        self.register_buffer("positions", torch.arange(longest))

    def forward(self, x: Tensor, cu_seqlens: None = None, max_seqlen: None = None) -> Tensor:
        """x (B, L, d_model), L <= longest -> same shape."""
        mixer = self.mixer
        states = state_matrices_form(mixer.elements(x), mixer.config.construction, mixer.order)
        if mixer.decay_root is not None:
            states = states / (1 + mixer.decay_root.square())[:, None, None]
        identity = torch.eye(states.shape[-1], dtype=states.dtype, device=states.device)
        places = self.positions.index_select(0, torch.arange(x.shape[1], device=x.device))
        for done in (2**k for k in range(self.rounds)):
            before = states.index_select(1, (places - done).clamp(min=0))
            starts = (places < done)[:, None, None, None]
            states = torch.where(starts, identity, before) @ states
        return self.mixer.combine(states, x)


class OnnxForm(nn.Module):
    """A copy of a model of texts: token ids (B, L) -> outputs (B, L, n), or (B, n) where there is one for each text."""

    def __init__(self, model: Backbone, longest: int) -> None:
        """longest: text that an MRU takes. Raises ValueError (one line) for models of other inputs than tokens."""
        super().__init__()
        if not model.tokens:
            raise ValueError(f"ONNX files are written of models of texts, not of an {model.config.architecture}")
        self.model = copy.deepcopy(model).float().eval()
        for block in self.model.blocks:
            if isinstance(block.mixer, MRU):
                block.mixer = DoublingForm(block.mixer, longest)
            elif block.mixer is not None:
                block.mixer = MatrixForm(block.mixer)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Outputs without padding: all texts of a batch have the same length."""
        model = self.model
        x = model.embed(input_ids, None, token_type_ids=token_type_ids)
        for block in model.blocks:
            x = block(x)
        if model.per_document:
            x = model.norm(x[:, 0]) if model.config.head.pooling == "cls" else model.norm(x).mean(1)
        x = model.features(x)
        weight, bias = model.output_projection()
        return x if weight is None else F.linear(x, weight, bias)


def short_conv_form(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    causal: bool,
    activation: str | None,
    cu_seqlens: None,
    backend: str,
) -> Tensor:
    """The op matmix::short_conv of texts that are not packed."""
    assert cu_seqlens is None
    width = weight.shape[-1]
    left = width - 1 if causal else width // 2
    y = F.conv1d(F.pad(x.transpose(1, 2), (left, width - 1 - left)), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return (F.silu(y) if activation == "silu" else y).transpose(1, 2)


def gated_norm_form(
    x: Tensor, weight: Tensor, gate: Tensor, eps: float, group_size: int | None, backend: str
) -> Tensor:
    """The op matmix::gated_norm."""
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight * F.silu(gate)


def diagonal_scatter_form(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """torch.diagonal_scatter of square matrices in the last two dimensions: what writing to a diagonal in place
    becomes, which the way to ONNX does not know."""
    assert offset == 0
    assert {dim1 % x.dim(), dim2 % x.dim()} == {x.dim() - 2, x.dim() - 1}
    return torch.where(torch.eye(x.shape[-1], dtype=torch.bool, device=x.device), source.unsqueeze(-1), x)
