"""The MRU mixer in PyTorch: elements, state matrices, scan and projection, and the norms of states, which a training
run records because not every construction bounds them. Only the elements, or the tokens' chunks, are stored for the
backward pass.

Elements can be made from chunks of the tokens, with few parameters, as in mru-lm's first form (December 2024). A
token's d_model numbers are nheads x o chunks of d_chunk; row i of a head's M is its chunk i times W_up[head]. The
elements of a construction are M row by row, or, where it takes a triangle, the strictly lower one of (M - M^T) /
sqrt(2), so that every weight counts and the elements are as large as those of M.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matmix.kernels.context import Context
from matmix.kernels.functions import Form, Operation, outside_autocast, working
from matmix.kernels.matrix_product.chunked import (
    ProductInputs,
    ProductOutputs,
    matrix_product_chunked,
    product_backward,
    product_forward,
)
from matmix.kernels.matrix_product.parts import Part
from matmix.kernels.mru.constructions import (
    TRIANGLES,
    AffineMap,
    CayleyTransform,
    UnitDeterminantProduct,
    build_state_matrices,
)

EVERY = 64
"""Tokens between the states that are looked at. A state that has left the range of float32 stays out of it until its
document ends, so the states at the documents' ends show every overflow, and a sample shows the growth on the way."""

NOTHING = float("-inf")
"""Stands where there is no state; the log-norm of a state of zeros is a finite number."""


def log_norms(states: Tensor) -> Tensor:
    """Natural log of the Frobenius norm: (..., o, o) -> (...), float32 or float64.

    Exact also where squares would overflow or vanish; infinite or NaN where an element is.
    """
    states = states.detach().to(torch.promote_types(states.dtype, torch.float32)).flatten(-2)
    largest = states.abs().amax(-1).clamp_min(torch.finfo(states.dtype).tiny)
    # Infinity over infinity is NaN; the sum below must still say infinity.
    relative = (states / largest.unsqueeze(-1)).square().sum(-1)
    return largest.log() + torch.where(largest.isinf(), torch.ones_like(relative), relative.clamp_min(1)).log() / 2


def summary(norms: Tensor, context: Context | None = None) -> Tensor:
    """Largest and mean of the log-norms of all ranks, (2,); entries of `NOTHING` are left out, a NaN shows in both."""
    norms = norms.flatten()
    there = norms != NOTHING
    largest, total, count = norms.amax(), norms.where(there, 0).sum(), there.sum()
    if context is not None:
        # An operation of PyTorch's, as this is traced by its compiler.
        own, functional = torch.stack([largest, total, count.to(norms.dtype)]), torch.ops._c10d_functional
        sent = functional.all_gather_into_tensor(own, context.size, context.name)
        of_all = functional.wait_tensor(sent).view(-1, 3)
        largest, (total, count) = of_all[:, 0].amax(), of_all[:, 1:].sum(0)
    return torch.stack([largest, total / count])


def sample_start(seqlen: int, context: Context | None) -> int:
    """The first token of a part whose state is looked at: of whole rows it is every 64th."""
    return EVERY - 1 if context is None else (EVERY - 1 - context.rank * seqlen) % EVERY


def sampled_log_norms(h: Tensor, final: Tensor, part: Part | None = None) -> Tensor:
    """Log-norms (n, nheads) of every 64th state of `h` (batch, seqlen, nheads, o, o) and of the documents' last states
    (rows, nheads, o, o)."""
    start = sample_start(h.shape[1], None if part is None else part.context)
    norms = log_norms(torch.cat([h[:, start::EVERY].flatten(0, 1), final]))
    if part is None:
        return norms
    within, ends = norms.split([len(norms) - len(final), len(final)])
    return torch.cat([within, part.own(ends, False, NOTHING)])


def scan_log_norms(
    h: Tensor, final: Tensor, cu_seqlens: Tensor | None = None, context: Context | None = None
) -> Tensor:
    """Largest and mean, (2,), of `sampled_log_norms`, of all ranks that hold parts of the rows."""
    return summary(sampled_log_norms(h, final, Part.of(context, cu_seqlens, h)), context)


@outside_autocast
def elements_from_chunks(chunks: Tensor, w_up: Tensor, construction: str) -> Tensor:
    """(..., nheads, o, d_chunk) by (nheads, d_chunk, `element_columns`) -> (..., nheads, E), E as `state_elements`
    says, float32 (float64 for float64), differentiable."""
    chunks, w_up = working(chunks), working(w_up)
    order = chunks.shape[-2]
    matrices = torch.einsum("...hic,hcj->...hij", chunks, w_up.to(chunks.dtype)).flatten(-2)
    if construction not in TRIANGLES:
        return matrices
    below, above = _triangle(order, chunks.device)
    return (matrices.index_select(-1, below) - matrices.index_select(-1, above)) * math.sqrt(0.5)


def chunks_gradient(gradient: Tensor, chunks: Tensor, w_up: Tensor, construction: str) -> tuple[Tensor, Tensor]:
    """Gradients of chunks and weights, typed as these, from that of the elements."""
    given, weights = working(chunks), working(w_up)
    order = chunks.shape[-2]
    if construction in TRIANGLES:
        below, above = _triangle(order, chunks.device)
        whole = gradient.new_zeros(*gradient.shape[:-1], order**2)
        whole[..., below] = gradient * math.sqrt(0.5)
        whole[..., above] = gradient * -math.sqrt(0.5)
        gradient = whole
    gradient = gradient.unflatten(-1, (order, -1))
    dchunks = torch.einsum("...hij,hcj->...hic", gradient, weights.to(gradient.dtype))
    dw_up = torch.einsum("blhic,blhij->hcj", given, gradient)
    return dchunks.to(chunks.dtype), dw_up.to(w_up.dtype)


def _triangle(order: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the strictly lower triangle in a flat matrix, row by row, and those of their mirror images."""
    rows, columns = torch.tril_indices(order, order, -1, device=device)
    return rows * order + columns, columns * order + rows


@outside_autocast
def state_matrices(elements: Tensor, construction: str, order: int) -> Tensor:
    """X (..., o, o) float32 (float64 for float64) from elements of any precision, differentiable."""
    return build_state_matrices(working(elements), construction, order)


def project(states: Tensor, w_down: Tensor) -> Tensor:
    """(batch, seqlen, nheads, o, n) by (nheads, n, m): one product per head, with all tokens as rows."""
    batch, seqlen, heads, order, columns = states.shape
    rows = states.permute(2, 0, 1, 3, 4).reshape(heads, batch * seqlen * order, columns)
    return (rows @ w_down).view(heads, batch, seqlen, order, -1).permute(1, 2, 0, 3, 4)


def made_elements(given: Tensor, w_up: Tensor | None, construction: str) -> Tensor:
    """The elements as given, or from chunks."""
    return given if w_up is None else elements_from_chunks(given, w_up, construction)


class MixerInputs(NamedTuple):
    """The arguments of matmix::mru_mixer; see `mru_mixer`."""

    elements: Tensor
    w_down: Tensor
    w_up: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    construction: str = "cayley"
    context: str = ""

    def made(self) -> tuple[Tensor, Tensor]:
        """Elements as given, or from chunks, and the state matrices that are made of them."""
        elements = made_elements(self.elements, self.w_up, self.construction)
        return elements, state_matrices(elements, self.construction, self.w_down.shape[1])

    def product(self, x: Tensor) -> ProductInputs:
        """The scan over state matrices."""
        return ProductInputs(x, self.initial_state, self.cu_seqlens, None, self.context, self.columns)

    @property
    def columns(self) -> int:
        """The columns of products that ranks send: of those of affine maps from the identity on, half."""
        narrow = self.construction == "affine" and self.initial_state is None
        return self.w_down.shape[1] // 2 if narrow else 0


class MixerOutputs(NamedTuple):
    """The results of matmix::mru_mixer."""

    y: Tensor
    final: Tensor
    norms: Tensor
    """Log-norms (n, nheads) of some states."""
    edges: Tensor
    """States at the edges of chunks, for the backward pass; empty where the PyTorch form runs."""
    entered: Tensor | None
    """The states (batch, nheads, o, o) that enter a part, for the backward pass."""


@outside_autocast
def mixer_forward(given: MixerInputs) -> MixerOutputs:
    h, final, _, entered = product_forward(given.product(given.made()[1]))
    y = project(h, given.w_down.to(h.dtype)).to(given.elements.dtype).contiguous()
    norms = sampled_log_norms(h, final, Part.of(Context.named(given.context), given.cu_seqlens, h)).float()
    return MixerOutputs(y, final, norms, y.new_empty(0, dtype=torch.float32), entered)


@outside_autocast
def mixer_backward(
    given: MixerInputs, outputs: MixerOutputs, cotangents: MixerOutputs
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of elements (or chunks), both weights and initial state. State matrices and states are computed
    again."""
    elements, w_down, w_up, *_, construction, _ = given
    made, x = given.made()
    outputs = product_forward(given.product(x), outputs.entered)
    h, dh, dw_down = outputs.h, None, torch.zeros_like(w_down)
    if cotangents.y is not None:
        dy = working(cotangents.y)
        dh = project(dy, w_down.to(h.dtype).mT)
        dw_down = torch.einsum("blhij,blhic->hjc", h, dy).to(w_down.dtype)
    dx, dinitial = product_backward(given.product(x), outputs, ProductOutputs(dh, cotangents.final, None, None))
    if construction == "cayley":
        dx = CayleyTransform.gradient(x, dx)
    elif construction == "ldu":
        dx = UnitDeterminantProduct.gradient(working(made).reshape(x.shape), dx)
    elif construction == "affine":
        dx = AffineMap.gradient(working(made), dx)
    dmade = dx.reshape(made.shape)
    if w_up is None:
        return dmade.to(elements.dtype), dw_down, None, dinitial
    delements, dw_up = chunks_gradient(dmade, elements, w_up, construction)
    return delements, dw_down, dw_up, dinitial


MRU_MIXER = Operation(
    "mru_mixer", MixerInputs, MixerOutputs, Form(mixer_forward, mixer_backward),
    without_gradient=("norms", "edges", "entered"), kept=lambda given: ("edges", "entered"),
)  # fmt: skip


@outside_autocast
def composed_mixer(scan: Callable, given: MixerInputs, context: Context | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and (2,) log-norms from autograd's own parts: any construction, all states in memory."""
    _, x = given.made()
    cut = {} if context is None else {"context": context, "columns": given.columns}
    h, final = scan(x, initial_state=given.initial_state, return_final_state=True, cu_seqlens=given.cu_seqlens, **cut)
    y = project(h, given.w_down.to(h.dtype)).to(given.elements.dtype)
    return y, final, scan_log_norms(h, final, given.cu_seqlens, context).float()


def mru_mixer_torch(
    *tensors: Tensor, return_final_state: bool = False, return_log_norms: bool = False, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """`mru_mixer` in PyTorch, without argument checks; see there."""
    results = composed_mixer(matrix_product_chunked, MixerInputs(*tensors, **options))
    return chosen(*results, return_final_state, return_log_norms)


def mru_step_torch(elements: Tensor, state: Tensor, w_down: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`mru_step` with a projection, in PyTorch."""
    given = MixerInputs(elements.unsqueeze(1), w_down, initial_state=state, **options)
    y, state, _ = composed_mixer(matrix_product_chunked, given)
    return y.squeeze(1), state


def chosen(y: Tensor, final: Tensor, norms: Tensor, with_final: bool, with_norms: bool) -> Tensor | tuple[Tensor, ...]:
    """The requested results; a single one is returned without a tuple."""
    results = (y, *([final] if with_final else []), *([norms] if with_norms else []))
    return results if len(results) > 1 else y
