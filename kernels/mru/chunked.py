"""The MRU mixer in PyTorch: elements, state matrices, scan and projection, and the norms of states, which a training
run records because not every construction bounds them. Only the elements, or the tokens' chunks, are stored for the
backward pass.

Elements can be made from chunks of the tokens, with few parameters, as in mru-lm's first form (December 2024). A
token's d_model numbers are nheads x o chunks of d_chunk; row i of a head's M is its chunk i times W_up[head]. The
elements of a construction are M row by row, or, where it takes a triangle, the strictly lower one of (M - M^T) /
sqrt(2), so that every weight counts and the elements are as large as those of M.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from matmix.kernels.functions import outside_autocast, working
from matmix.kernels.matrix_product.chunked import matrix_product_chunked, product_backward, product_forward
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


def summary(norms: Tensor) -> Tensor:
    """Largest and mean of log-norms, (2,); entries of `NOTHING` are left out, a NaN shows in both."""
    norms = norms.flatten()
    there = norms != NOTHING
    return torch.stack([norms.amax(), norms.where(there, 0).sum() / there.sum()])


def sampled_log_norms(h: Tensor, final: Tensor) -> Tensor:
    """Log-norms (n, nheads) of every 64th state of `h` (batch, seqlen, nheads, o, o) and of the documents' last states
    (rows, nheads, o, o)."""
    return log_norms(torch.cat([h[:, EVERY - 1 :: EVERY].flatten(0, 1), final]))


def scan_log_norms(h: Tensor, final: Tensor) -> Tensor:
    """Largest and mean, (2,), of `sampled_log_norms`."""
    return summary(sampled_log_norms(h, final))


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


@outside_autocast
def mixer_forward(
    elements: Tensor,
    w_down: Tensor,
    w_up: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    construction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs (batch, seqlen, nheads, o, d_c) typed like the elements, final states, log-norms (n, nheads) of some
    states, and the tensors that the backward pass needs besides the inputs (here none)."""
    x = state_matrices(made_elements(elements, w_up, construction), construction, w_down.shape[1])
    h, final, _ = product_forward(x, initial_state, cu_seqlens, None)
    y = project(h, w_down.to(h.dtype)).to(elements.dtype).contiguous()
    return y, final, sampled_log_norms(h, final).float(), y.new_empty(0, dtype=torch.float32)


@outside_autocast
def mixer_backward(
    dy: Tensor | None,
    dfinal: Tensor | None,
    elements: Tensor,
    w_down: Tensor,
    w_up: Tensor | None,
    edges: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    construction: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of elements (or chunks), both weights and initial state. State matrices and states are computed
    again."""
    made = made_elements(elements, w_up, construction)
    x = state_matrices(made, construction, w_down.shape[1])
    h, _, products = product_forward(x, initial_state, cu_seqlens, None)
    dh, dw_down = None, torch.zeros_like(w_down)
    if dy is not None:
        dy = working(dy)
        dh = project(dy, w_down.to(h.dtype).mT)
        dw_down = torch.einsum("blhij,blhic->hjc", h, dy).to(w_down.dtype)
    dx, dinitial = product_backward(dh, dfinal, x, h, products, initial_state, cu_seqlens, None)
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


@outside_autocast
def composed_mixer(
    scan: Callable,
    elements: Tensor,
    w_down: Tensor,
    w_up: Tensor | None,
    construction: str,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and (2,) log-norms from autograd's own parts: any construction, all states in memory."""
    x = state_matrices(made_elements(elements, w_up, construction), construction, w_down.shape[1])
    h, final = scan(x, initial_state=initial_state, return_final_state=True, cu_seqlens=cu_seqlens)
    y = project(h, w_down.to(h.dtype)).to(elements.dtype)
    return y, final, scan_log_norms(h, final).float()


def mru_mixer_torch(
    elements: Tensor,
    w_down: Tensor,
    *,
    w_up: Tensor | None = None,
    construction: str = "cayley",
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    return_log_norms: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`mru_mixer` in PyTorch, without argument checks; see there."""
    y, final, norms = composed_mixer(
        matrix_product_chunked, elements, w_down, w_up, construction, initial_state, cu_seqlens
    )
    return chosen(y, final, norms, return_final_state, return_log_norms)


def mru_step_torch(
    elements: Tensor, state: Tensor, w_down: Tensor, *, w_up: Tensor | None = None, construction: str = "cayley"
) -> tuple[Tensor, Tensor]:
    """`mru_step` with a projection, in PyTorch."""
    y, state = mru_mixer_torch(
        elements.unsqueeze(1),
        w_down,
        w_up=w_up,
        construction=construction,
        initial_state=state,
        return_final_state=True,
    )
    return y.squeeze(1), state


def chosen(y: Tensor, final: Tensor, norms: Tensor, with_final: bool, with_norms: bool) -> Tensor | tuple[Tensor, ...]:
    """The requested results; a single one is returned without a tuple."""
    results = (y, *([final] if with_final else []), *([norms] if with_norms else []))
    return results if len(results) > 1 else y
