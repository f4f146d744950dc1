"""The MRU for a single token, which generation uses."""

from __future__ import annotations

from torch import Tensor

from matmix.kernels.backend import check_backend
from matmix.kernels.checks import check_choice, check_finite, check_floating
from matmix.kernels.matrix_product.op import check_state, matrix_product_scan
from matmix.kernels.matrix_product.spans import ORDERS
from matmix.kernels.mru.chunked import made_elements, state_matrices
from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.kernels.mru.op import mru_mixer, token_shape


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
    check_choice(op, "construction", construction, CONSTRUCTIONS)
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
            elements.unsqueeze(1),
            w_down,
            w_up=w_up,
            construction=construction,
            initial_state=state,
            return_final_state=True,
            backend=backend,
        )
        return y.squeeze(1), state
    check_finite(op, elements=elements, state=state, w_up=w_up)
    x = state_matrices(made_elements(elements, w_up, construction), construction, order).unsqueeze(1)
    return matrix_product_scan(x, initial_state=state, return_final_state=True, backend=backend)[1]
