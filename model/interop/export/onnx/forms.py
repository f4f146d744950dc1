"""Models of texts in forms that ONNX can express, for texts of any length.

The fast algorithms choose blocks by the length, write in place and read boundaries of documents. Here each mixer is its
matrix instead, whose memory grows with the square of the length; states of the MRU and of the matrix memory are made by
doubling.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels.mru.constructions import NEWTON_SCHULZ_STEPS, AffineMap
from matmix.kernels.mru.constructions.orthogonal import norm_bound
from matmix.model.backbone import Backbone
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.matrix_memory import MatrixMemory
from matmix.model.mixers.mru import MRU, faded
from matmix.model.mixers.products import CONSTRUCTION, ORDER

# -- onnx constructions --------------------------------------------------------------------------------


def state_matrices_form(elements: Tensor, construction: str, order: int) -> Tensor:
    """(..., elements) -> (..., order, order), as `build_state_matrices` has them."""
    identity = torch.eye(order, dtype=elements.dtype, device=elements.device)
    if construction == "affine":
        rows, memory, _ = AffineMap.factors(elements, order)
        left = torch.cat((rows, memory), dim=-2)
        return torch.cat((left, identity[:, order // 2 :].expand(*left.shape[:-1], -1)), dim=-1)
    if construction in ("cayley", "householder"):
        lower = strictly_lower(elements, order)
        return cayley(lower, identity) if construction == "cayley" else reflections(lower, identity)
    m = elements.unflatten(-1, (order, order))
    if construction == "identity_plus":
        return identity + m
    if construction == "newton_schulz":
        return towards_orthogonal(identity + m)
    below, above = identity.new_ones(order, order).tril(-1), identity.new_ones(order, order).triu(1)
    diagonal = (m * identity).sum(-1, keepdim=True)
    exponents = diagonal - diagonal.mean(-2, keepdim=True)
    if construction == "qr":
        return cayley(m * below, identity) @ (m * above + exponents.exp() * identity)
    scale = (exponents / 2).exp() * identity
    product = (m * below + scale) @ (m * above + scale)
    if construction == "ldu":
        return product
    assert construction == "ldu_newton_schulz", construction
    return towards_orthogonal(product)


def towards_orthogonal(y: Tensor) -> Tensor:
    """As `approach` in the MRU's constructions, without lerp."""
    z = y / norm_bound(y)
    for _ in range(NEWTON_SCHULZ_STEPS):
        z = 1.5 * z - 0.5 * (z @ (z.mT @ z))
    return z


def strictly_lower(elements: Tensor, order: int) -> Tensor:
    """Elements (..., order (order - 1) / 2) put below the diagonal, row by row, by a product with zeros and ones."""
    rows, columns = torch.tril_indices(order, order, -1)
    places = torch.zeros(elements.shape[-1], order * order, dtype=elements.dtype, device=elements.device)
    places[torch.arange(elements.shape[-1]), rows * order + columns] = 1
    return (elements @ places).unflatten(-1, (order, order))


def cayley(lower: Tensor, identity: Tensor) -> Tensor:
    """(I - S)^-1 (I + S), S = lower - lower^T, by elimination; as S is skew, no pivot is below 1."""
    order = identity.shape[-1]
    skew = lower - lower.mT
    rows = torch.cat((identity - skew, identity + skew), dim=-1)
    for k in range(order):
        pivot = rows[..., k : k + 1, :] / rows[..., k : k + 1, k : k + 1]
        here = identity[k].unsqueeze(-1)
        rows = here * pivot + (1 - here) * (rows - rows[..., k : k + 1] * pivot)
    return rows[..., order:]


def reflections(lower: Tensor, identity: Tensor) -> Tensor:
    """-H_1 ... H_o, H_k = I - 2 v v^T / |v|^2 with v = e_k + column k of `lower`."""
    x, vectors = -identity, lower + identity
    for k in reversed(range(identity.shape[-1])):
        v = vectors[..., k : k + 1]
        x = x - (2 / v.square().sum(-2, keepdim=True)) * v @ (v.mT @ x)
    return x


class MatrixForm(nn.Module):
    """A mixer by its matrix."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, cu_seqlens: None = None, max_seqlen: None = None) -> Tensor:
        """x (B, L, d_model) -> same shape."""
        return self.mixer.combine(self.mixer.mix(self.mixer.matrix(x), self.mixer.values(x)), x)


class DoublingForm(nn.Module):
    """A mixer whose states are made in log2(longest) rounds: after round k a state is that of its own token and of the
    2^k - 1 before it."""

    positions: Tensor

    def __init__(self, mixer: Mixer, longest: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.rounds = max(longest - 1, 0).bit_length()
        # Looked up, so that a longer text is an error and no state that lacks its beginning.
        self.register_buffer("positions", torch.arange(longest))

    def doubled(self, states: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """States (B, L, H, ...) of all tokens so far from those of single tokens; join(earlier, later)."""
        places = self.positions.index_select(0, torch.arange(states.shape[1], device=states.device))
        for done in (2**k for k in range(self.rounds)):
            before = states.index_select(1, (places - done).clamp(min=0))
            starts = (places < done).view(-1, *[1] * (states.dim() - 2))
            states = torch.where(starts, states, join(before, states))
        return states


class ProductForm(DoublingForm):
    """An MRU: products of state matrices."""

    def forward(self, x: Tensor, cu_seqlens: None = None, max_seqlen: None = None) -> Tensor:
        """x (B, L, d_model), L <= longest -> same shape."""
        mixer = self.mixer
        states = state_matrices_form(mixer.elements(x), mixer.config.construction, mixer.order)
        if mixer.decay_root is not None:
            states = faded(states, mixer.decay_root)
        return mixer.combine(self.doubled(states, torch.matmul), x)


class MemoryForm(DoublingForm):
    """A matrix memory: above the states stand products of the matrices that turn them; and its heads of products."""

    def forward(self, x: Tensor, cu_seqlens: None = None, max_seqlen: None = None) -> Tensor:
        """x (B, L, d_model), L <= longest -> same shape."""
        source, _ = self.mixer.source(x)
        values, turns, keys, queries = self.mixer.parts(source)
        order = self.mixer.config.d_state

        def join(before: Tensor, states: Tensor) -> Tensor:
            turned = before @ states[..., :order, :]
            return torch.cat((turned[..., :order, :], turned[..., order:, :] + states[..., order:, :]), dim=-2)

        states = self.doubled(torch.cat((turns, values.unsqueeze(-1) * keys.unsqueeze(-2)), dim=-2), join)
        read = states[..., order:, :] @ queries.unsqueeze(-1)
        y = self.mixer.finish(read.squeeze(-1), source, x)
        if (heads := self.mixer.products) is None:
            return y
        made = faded(state_matrices_form(heads.elements(x), CONSTRUCTION, ORDER), heads.fade_root)
        return y + heads.read(self.doubled(made, torch.matmul), x)


class OnnxForm(nn.Module):
    """A copy of a model of texts: token ids (B, L) -> outputs (B, L, n), or (B, n) where there is one for each text."""

    def __init__(self, model: Backbone, longest: int) -> None:
        """longest: text that an MRU or a matrix memory takes. Raises ValueError (one line) for models of other inputs
        than tokens."""
        super().__init__()
        if model.inputs != "tokens":
            raise ValueError(f"ONNX files are written of models of texts, not of an {model.config.architecture}")
        self.model = copy.deepcopy(model).float().eval()
        for block in self.model.blocks:
            if isinstance(block.mixer, MRU | MatrixMemory):
                form = ProductForm if isinstance(block.mixer, MRU) else MemoryForm
                block.mixer = form(block.mixer, longest)
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
        return x if weight is None else model.capped(F.linear(x, weight, bias))


def short_conv_form(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    causal: bool,
    activation: str | None,
    cu_seqlens: None,
    context: str,
    backend: str,
) -> Tensor:
    """The op matmix::short_conv of texts that are not packed, and whole."""
    assert cu_seqlens is None
    assert not context
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


def of_ops() -> dict[Any, Callable[..., Tensor]]:
    """Returns op -> the form that stands in for it."""
    ours, aten = torch.ops.matmix, torch.ops.aten
    return {
        ours.short_conv.default: short_conv_form,
        ours.gated_norm.default: gated_norm_form,
        aten.diagonal_scatter.default: diagonal_scatter_form,
    }
