"""LION (arXiv 2502.16249) in three forms that agree: full attention, chunked, and a recurrence in each direction.

All take q, k (B, L, H, N) after the feature map and the scale, v (B, L, H, P), and the logarithms of the gates
(B, L, H), (H,) if they are the same for every token, or None for no decay, and return

    Y = (Q K^T * M) V / (row sums of Q K^T * M + eps)    (B, L, H, P).

M[i, j] is 1 on the diagonal and else the product of the gates g_k between the two tokens:

    i > j: k = j + 1 - a .. i - a    with a = forward_gate_offset
    i < j: k = i + b .. j - 1 + b    with b = gate_offset

a = 0 and b = 1 are LION's recurrences in one picture: each gate acts between a token and its left neighbour, and M is
symmetric. a = b = 1 is what the authors' code computes (each token's own gate acts on what it sends out), a = b = 0 a
causal scan and its mirror image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels import quasiseparable_scan, semiseparable_step
from matmix.kernels.documents import shift_right
from matmix.model.mixers.base import gate_sums


def lion_weights(
    q: Tensor, k: Tensor, log_gate: Tensor | None, *, gate_offset: int, forward_gate_offset: int
) -> Tensor:
    """Q K^T * M, (B, H, L, L), entry by entry."""
    exact, length = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    weights = torch.einsum("bihn,bjhn->bhij", q, k).to(exact)
    if log_gate is not None:
        below = gate_sums(delayed_gates(log_gate, forward_gate_offset), length)
        above = gate_sums(delayed_gates(log_gate, 1 - gate_offset), length).mT
        weights = weights * (below + above).exp()  # each is 0 where the other is not
    return weights


def lion_matrix(
    q: Tensor, k: Tensor, log_gate: Tensor | None, *, gate_offset: int, forward_gate_offset: int, eps: float
) -> Tensor:
    """The mixer with its rows normalised, (B, H, L, L), entry by entry."""
    weights = lion_weights(q, k, log_gate, gate_offset=gate_offset, forward_gate_offset=forward_gate_offset)
    return weights / (weights.sum(-1, keepdim=True) + eps)


def delayed_gates(log_gate: Tensor, steps: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Each token's gate, or (steps 1) that of the token before it in its document."""
    return shift_right(log_gate, cu_seqlens) if steps and log_gate.dim() == 3 else log_gate


def lion_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    *,
    gate_offset: int,
    forward_gate_offset: int,
    eps: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Full attention, O(L^2). Knows no documents."""
    assert cu_seqlens is None, "the attention form is called for one document at a time"
    matrix = lion_matrix(q, k, log_gate, gate_offset=gate_offset, forward_gate_offset=forward_gate_offset, eps=eps)
    return torch.einsum("bhij,bjhp->bihp", matrix.to(v.dtype), v)


def lion_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    *,
    gate_offset: int,
    forward_gate_offset: int,
    eps: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Attention inside chunks and states between them, O(L): the bidirectional scan."""
    forward = None if log_gate is None else delayed_gates(log_gate, forward_gate_offset, cu_seqlens)
    return quasiseparable_scan(
        v, q, k, q, k, forward, log_gate, shift=False, self_term="mean", normalize="row_sum", eps=eps,
        gate_offset=gate_offset, cu_seqlens=cu_seqlens,
    )  # fmt: skip


class LionState(NamedTuple):
    """The state that one direction carries from token to token, in float32 at least."""

    products: Tensor
    """S (B, H, N, P): sum of k v^T over the tokens so far, decayed."""
    keys: Tensor
    """z (B, H, N): sum of k, decayed alike."""
    log_gate: Tensor
    """(B, H): the gate of the last token, for directions in which it acts one step later."""


def empty_lion_state(batch: int, nheads: int, d_state: int, headdim: int, like: Tensor) -> LionState:
    """The state before a direction's first token, on the device of `like`."""
    exact = torch.promote_types(like.dtype, torch.float32)
    return LionState(
        like.new_zeros(batch, nheads, d_state, headdim, dtype=exact),
        like.new_zeros(batch, nheads, d_state, dtype=exact),
        like.new_zeros(batch, nheads, dtype=exact),
    )


def lion_step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, state: LionState, *, delayed: bool
) -> tuple[Tensor, Tensor, LionState]:
    """One token of one direction: q, k (B, H, N), v (B, H, P), log_gate (B, H), (H,) or None.

        S = g S + k v^T,  z = g z + k,  y = q S - 1/2 (q . k) v,  c = q . z - 1/2 q . k

    delayed: g is the gate of the token before this one in the direction's own sense, else this token's.
    Returns: y (B, H, P), c (B, H) and the new state; the given one is left as it is.
    """
    exact = state.keys.dtype
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    products, keys, last, gate = *state, None
    if log_gate is not None:
        log_gate = log_gate.to(exact).expand_as(last)
        gate = last if delayed else log_gate
        keys, last = gate.exp().unsqueeze(-1) * keys, log_gate
    keys = keys + k
    own = 0.5 * (q * k).sum(-1)
    y, products = semiseparable_step(v, q, k, gate, products, diagonal=-own)
    return y, (q * keys).sum(-1) - own, LionState(products, keys, last)


def lion_merge(y_forward: Tensor, c_forward: Tensor, y_backward: Tensor, c_backward: Tensor, eps: float) -> Tensor:
    """(y^F + y^B) / (c^F + c^B + eps): (..., P) and (...) of both directions -> (..., P)."""
    return (y_forward + y_backward) / (c_forward + c_backward + eps).unsqueeze(-1)


def lion_directions(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    *,
    gate_offset: int,
    forward_gate_offset: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two passes over the tokens, each with a state of constant size: y (B, L, H, P) and c (B, L, H) of the forward
    one, then of the backward one."""
    batch, length, nheads, d_state = q.shape
    positions = torch.arange(length, device=q.device)
    empty = empty_lion_state(batch, nheads, d_state, v.shape[-1], v)

    def direction(order: range, edges: Tensor | None, delayed: bool) -> tuple[list[Tensor], list[Tensor]]:
        state = empty
        ys: list[Tensor] = [v] * length
        cs: list[Tensor] = [v] * length
        for t in order:
            if edges is not None:  # where a document begins in this direction, both sums start again
                state = LionState(*(part.masked_fill(edges[t], 0) for part in state))
            gate = log_gate[:, t] if log_gate is not None and log_gate.dim() == 3 else log_gate
            ys[t], cs[t], state = lion_step(q[:, t], k[:, t], v[:, t], gate, state, delayed=delayed)
        return ys, cs

    first = last = None
    if cu_seqlens is not None:
        first, last = torch.isin(positions, cu_seqlens), torch.isin(positions + 1, cu_seqlens)
    forward = direction(range(length), first, forward_gate_offset == 1)
    backward = direction(range(length - 1, -1, -1), last, gate_offset == 1)
    yf, cf, yb, cb = (torch.stack(part, 1) for part in (*forward, *backward))
    return yf, cf, yb, cb


def lion_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    *,
    gate_offset: int,
    forward_gate_offset: int,
    eps: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Two passes over the tokens; between them only y^F and c^F are kept."""
    parts = lion_directions(
        q, k, v, log_gate, gate_offset=gate_offset, forward_gate_offset=forward_gate_offset, cu_seqlens=cu_seqlens
    )
    return lion_merge(*parts, eps).to(v.dtype)


def lion_sums(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    *,
    gate_offset: int,
    forward_gate_offset: int,
) -> tuple[Tensor, Tensor]:
    """(Q K^T * M) V (B, L, H, P) and the row sums of Q K^T * M (B, L, H), in float32 at least, by one of the forms:
    what several masks are added by before rows are divided."""
    exact = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    offsets = {"gate_offset": gate_offset, "forward_gate_offset": forward_gate_offset}
    if form == "attention":
        weights = lion_weights(q, k, log_gate, **offsets)
        return torch.einsum("bhij,bjhp->bihp", weights, v), weights.sum(-1).transpose(1, 2)
    if form == "recurrent":
        y_forward, c_forward, y_backward, c_backward = lion_directions(q, k, v, log_gate, **offsets)
        return y_forward + y_backward, c_forward + c_backward
    # A row's sum is what it makes of ones.
    forward = None if log_gate is None else delayed_gates(log_gate, forward_gate_offset)
    sums = quasiseparable_scan(
        F.pad(v, (0, 1), value=1.0), q, k, q, k, forward, log_gate, shift=False, self_term="mean",
        gate_offset=gate_offset,
    )  # fmt: skip
    return sums[..., :-1], sums[..., -1]


LION_FORMS = {"auto": lion_chunked, "attention": lion_attention, "chunked": lion_chunked, "recurrent": lion_recurrent}
"""`form` in the configuration -> function."""
