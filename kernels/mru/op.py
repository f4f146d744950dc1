"""The MRU mixer as an op: from the elements of state matrices to the projected states."""

import math

import torch
from torch import Tensor

from matmix.kernels.backend import check_backend, takes_triton, tell_fallback
from matmix.kernels.checks import check_choice, check_cu_seqlens, check_finite, check_floating
from matmix.kernels.context import Context, context_name
from matmix.kernels.functions import working_dtype
from matmix.kernels.matrix_product.op import check_state, matrix_product_scan
from matmix.kernels.matrix_product.spans import ORDERS
from matmix.kernels.mru.chunked import (
    EVERY,
    MRU_MIXER,
    MixerInputs,
    MixerOutputs,
    chosen,
    composed_mixer,
    made_elements,
    sample_start,
    state_matrices,
    summary,
)
from matmix.kernels.mru.constructions import CONSTRUCTIONS, PLAIN, element_columns, state_elements
from matmix.kernels.registration import register

FUSED = ("affine", "identity_plus", "ldu", "cayley")
"""Constructions that the fused form knows."""

NVIDIA_ONLY = ("cayley",)
"""Fused constructions whose kernels Triton's compiler for AMD's GPUs refuses."""

PRODUCTLESS = ("affine", "identity_plus")
"""Fused constructions that are built without a product of matrices."""

LARGEST_ORDER = 16
"""The largest order of the fused kernels: one tile of a matrix unit."""
LARGEST_WIDTHS = {torch.bfloat16: 32, torch.float16: 32, torch.float32: 16}
"""Columns of a head's weights that stay in registers beside the states, by dtype of the elements or chunks."""


def mru_mixer(
    elements: Tensor,
    w_down: Tensor,
    *,
    w_up: Tensor | None = None,
    construction: str = "cayley",
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    return_log_norms: bool = False,
    cu_seqlens: Tensor | None = None,
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """The MRU between its two large projections: y_t = H_t w_down[head], H_t = H_{t-1} X_t, X_t from its elements.

    On GPUs, for affine, identity_plus, ldu and cayley with o <= 16 and d_c = d_chunk <= 32 (16 for float32), H is not
    written to memory, nor are elements that come from chunks, nor X (but that of cayley, while a pass runs); what is
    kept for the backward pass are the elements or chunks and two matrices per 64 tokens. Other constructions, sizes and
    devices run `build_state_matrices`, `matrix_product_scan` and a product, with all states kept; backend="torch" keeps
    what is given alone and computes the rest again, which on a CPU takes 1.5 to 2 times as long.

    Args:
        elements: (batch, seqlen, nheads, E), E = `state_elements(construction, o)`; with `w_up` the tokens' chunks
            (batch, seqlen, nheads, o, d_chunk).
        w_down: (nheads, o, d_c); o is 4, 8, 16 or 32.
        w_up: (nheads, d_chunk, o), what makes elements of chunks, as `chunks.elements_from_chunks` says; None where
            elements are given.
        construction: one of `CONSTRUCTIONS`, or `PLAIN`; see `build_state_matrices`.
        initial_state: H_0, (batch, nheads, o, o) float32, or (documents, ...) with `cu_seqlens`; None for the identity.
        return_final_state: also return the state after the last token (of each document), float32.
        return_log_norms: also return (2,) float32, the largest and the mean natural log of the states' Frobenius norms,
            over heads and a sample of positions that holds each document's last: infinite or NaN as soon as a state is.
            No gradient.
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1); the product starts
            anew at each.
        context: the ranks that hold the other parts of the rows; see `matrix_product_scan`. Log-norms are then those of
            all parts.
        backend: "auto", "torch" or "triton".

    Returns:
        y (batch, seqlen, nheads, o, d_c) typed like the elements, then what was asked for. States are float32 (float64
        for float64 elements) whatever the inputs are.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "mru_mixer"
    check_floating(op, elements=elements, w_down=w_down, w_up=w_up, initial_state=initial_state)
    check_choice(op, "construction", construction, (*CONSTRUCTIONS, PLAIN))
    if w_down.dim() != 3 or w_down.shape[1] not in ORDERS or 0 in w_down.shape:
        allowed = ", ".join(map(str, ORDERS))
        raise ValueError(f"{op}: w_down has shape {tuple(w_down.shape)}; expected (nheads, o, d_c), o one of {allowed}")
    heads, order, _ = w_down.shape
    expected = token_shape(op, heads, order, w_up, construction)
    if tuple(elements.shape[2:]) != expected or 0 in elements.shape:
        raise ValueError(
            f"{op}: elements have shape {tuple(elements.shape)}; expected (batch, seqlen, "
            f"{', '.join(map(str, expected))}), as w_down is {tuple(w_down.shape)} and "
            + (f"the construction {construction}" if w_up is None else f"w_up {tuple(w_up.shape)}")
        )
    check_cu_seqlens(op, cu_seqlens, elements.shape[0], elements.shape[1], elements, part=context is not None)
    rows = elements.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_state(op, initial_state, elements, (rows, elements.shape[2], order, order))
    check_finite(op, elements=elements, w_down=w_down, w_up=w_up, initial_state=initial_state)
    why_not = no_kernel(elements, w_down, construction, w_up)
    check_backend(op, backend, elements, why_not)
    if construction in FUSED:
        tell_fallback(op, backend, elements, why_not)
    given = MixerInputs(elements, w_down, w_up, initial_state, cu_seqlens, construction, context_name(context))
    # Where there is no kernel for it, recomputing costs more time than keeping the states: that is for those who ask.
    if construction in FUSED and (backend == "torch" or (takes_triton(backend, elements) and not why_not)):
        y, final, norms, *_ = _mru_mixer(given, backend)
        norms = summary(norms, context) if return_log_norms else norms
    else:
        y, final, norms = composed_mixer(matrix_product_scan, given, context)
    return chosen(y, final, norms, return_final_state, return_log_norms)


def mru_mixer_is_fused(elements: Tensor, w_down: Tensor, construction: str, w_up: Tensor | None = None) -> bool:
    """Returns whether `mru_mixer` with backend="auto" runs its fused kernels on these inputs."""
    return not no_kernel(elements, w_down, construction, w_up) and takes_triton("auto", elements)


def no_kernel(elements: Tensor, w_down: Tensor, construction: str, w_up: Tensor | None = None) -> str:
    """The reason why the fused kernels cannot be used; empty if they can."""
    _, order, width = w_down.shape
    if construction not in FUSED:
        return f"knows the constructions {', '.join(FUSED)}, not {construction}"
    if torch.version.hip and construction in NVIDIA_ONLY:
        return f"builds {construction} on NVIDIA's GPUs only"
    if order > LARGEST_ORDER or order not in ORDERS:
        return f"takes matrices of order 4, 8 or 16, not {order}"
    largest = LARGEST_WIDTHS.get(elements.dtype, width)
    if width > largest:
        return f"projects to at most {largest} columns a head, not {width}"
    if w_up is not None and w_up.shape[1] != width:
        return f"takes chunks of {width} numbers, as many as it projects to, not {w_up.shape[1]}"
    return ""


def token_shape(op: str, heads: int, order: int, w_up: Tensor | None, construction: str) -> tuple[int, ...]:
    """The shape of a token's elements or, with `w_up`, of its chunks."""
    if w_up is None:
        return heads, state_elements(construction, order)
    columns = element_columns(construction, order)
    if w_up.dim() != 3 or (w_up.shape[0], w_up.shape[2]) != (heads, columns) or 0 in w_up.shape:
        raise ValueError(f"{op}: w_up has shape {tuple(w_up.shape)}; expected ({heads}, d_chunk, {columns})")
    return heads, order, w_up.shape[1]


def mru_step(
    elements: Tensor,
    state: Tensor,
    w_down: Tensor | None = None,
    *,
    w_up: Tensor | None = None,
    construction: str = "cayley",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """H_t = H_{t-1} X_t for one token, and with a projection also y_t = H_t w_down[head].

    What `matrix_product_scan` and `mru_mixer` do to a sequence, by the same ops; the cost of a token does not depend
    on how many came before.

    Args:
        elements: (batch, nheads, E), E = `state_elements(construction, o)`; with `w_up` the token's chunks
            (batch, nheads, o, d_chunk).
        state: H_{t-1}, (batch, nheads, o, o) float32; left as it is.
        w_down: (nheads, o, d_c), or None.
        w_up: (nheads, d_chunk, o), or None.
        construction: as in `mru_mixer`.
        backend: "auto", "torch" or "triton".

    Returns:
        H_t (batch, nheads, o, o) float32; with `w_down` (y_t, H_t), y_t (batch, nheads, o, d_c) typed like the
        elements.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "mru_step"
    if state is None:
        raise ValueError(f"{op}: state is None; give the identity, torch.eye(o), for the first token")
    check_floating(op, elements=elements, state=state, w_down=w_down, w_up=w_up)
    check_backend(op, backend, elements)
    check_choice(op, "construction", construction, (*CONSTRUCTIONS, PLAIN))
    if state.dim() != 4 or state.shape[-1] != state.shape[-2] or state.shape[-1] not in ORDERS:
        allowed = ", ".join(map(str, ORDERS))
        raise ValueError(
            f"{op}: state has shape {tuple(state.shape)}; expected (batch, nheads, o, o), o one of {allowed}"
        )
    batch, heads, order, _ = state.shape
    expected = (batch, *token_shape(op, heads, order, w_up, construction))
    if tuple(elements.shape) != expected:
        raise ValueError(
            f"{op}: elements have shape {tuple(elements.shape)}; expected {expected}, as the state is "
            f"{tuple(state.shape)} and the construction {construction}"
        )
    check_state(op, state, elements, tuple(state.shape), "state")
    if w_down is not None and (w_down.dim() != 3 or w_down.shape[:2] != (heads, order)):
        raise ValueError(
            f"{op}: w_down has shape {tuple(w_down.shape)}; expected ({heads}, {order}, d_c), as the state"
        )
    if w_down is not None:
        y, state = mru_mixer(
            elements.unsqueeze(1), w_down, w_up=w_up, construction=construction, initial_state=state,
            return_final_state=True, backend=backend,
        )  # fmt: skip
        return y.squeeze(1), state
    check_finite(op, elements=elements, state=state, w_up=w_up)
    x = state_matrices(made_elements(elements, w_up, construction), construction, order).unsqueeze(1)
    return matrix_product_scan(x, initial_state=state, return_final_state=True, backend=backend)[1]


def _like(given: MixerInputs, fused: bool) -> MixerOutputs:
    elements, w_down, cu_seqlens = given.elements, given.w_down, given.cu_seqlens
    batch, seqlen, heads = elements.shape[:3]
    _, order, width = w_down.shape
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = elements.new_empty((batch, seqlen, heads, order, width))
    final = elements.new_empty((rows, heads, order, order), dtype=working_dtype(elements))
    entered = final.new_empty((batch, *final.shape[1:])) if given.context else None
    if fused:
        from matmix.kernels.mru.fused import edges_like

        return MixerOutputs(y, final, *edges_like(given), entered)
    looked_at = len(range(sample_start(seqlen, Context.named(given.context)), seqlen, EVERY))
    norms = elements.new_empty((batch * looked_at + rows, heads), dtype=torch.float32)
    return MixerOutputs(y, final, norms, elements.new_empty(0, dtype=torch.float32), entered)


def _flops(given: MixerInputs, *, backward: bool) -> int:
    """Forward: chunk products, states and the projection; each builds X once. Backward: chunk products and sums,
    states, cotangents and gradients of X, of which those of the elements take two more; the projection back twice, and
    its own gradient. Elements from chunks: twice forward, twice backward with the two gradients of that."""
    batch, seqlen, heads = given.elements[:3]
    _, order, width = given.w_down
    products, projections = (5, 3) if backward else (2, 1)
    if given.construction not in PRODUCTLESS:
        # Built twice. An elimination takes order^3 multiply-adds, a product of triangles is counted as a dense one.
        products += 4 if backward else 2
    total = 2 * batch * seqlen * heads * order**2 * (products * order + projections * width)
    if given.w_up is not None:
        total += 2 * (4 if backward else 2) * math.prod(given.elements) * given.w_up[2]
    return total


_mru_mixer = register(
    MRU_MIXER, "mru.fused", _like, flops=_flops,
    why_not=lambda given: no_kernel(given.elements, given.w_down, given.construction, given.w_up),
)  # fmt: skip
