"""The MRU mixer in PyTorch: state matrices, scan and projection. Only the elements, or the tokens' chunks, are stored
for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matmix.kernels.matrix_product.backward import product_backward
from matmix.kernels.matrix_product.chunked import matrix_product_chunked
from matmix.kernels.matrix_product.forward import product_forward
from matmix.kernels.mru.chunks import chunks_gradient, elements_from_chunks
from matmix.kernels.mru.constructions import AffineMap, CayleyTransform, UnitDeterminantProduct, build_state_matrices
from matmix.kernels.mru.norms import sampled_log_norms, scan_log_norms
from matmix.kernels.precision import outside_autocast, working


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
    found = (y, *([final] if with_final else []), *([norms] if with_norms else []))
    return found if len(found) > 1 else y
