"""LION (arXiv 2502.16249) in three forms that agree: full attention, chunked, and a recurrence in each direction.

All take q, k (B, L, H, N) after the feature map and the scale, v (B, L, H, P), and the gates, and return

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
from matmix.kernels.functions import working
from matmix.model.mixers.base import gate_sums


class LionGates(NamedTuple):
    """The gates g_k, and which of them lie between two tokens."""

    logs: Tensor | None
    """Their logarithms (B, L, H), (H,) if they are the same for every token, or None for no decay."""
    gate_offset: int
    forward_gate_offset: int

    def delayed(self, steps: int, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """`delayed_gates` of them."""
        return None if self.logs is None else delayed_gates(self.logs, steps, cu_seqlens)


def delayed_gates(logs: Tensor, steps: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Each token's gate, or (steps 1) that of the token before it in its document."""
    return shift_right(logs, cu_seqlens) if steps and logs.dim() == 3 else logs


def lion_weights(q: Tensor, k: Tensor, gates: LionGates) -> Tensor:
    """Q K^T * M, (B, H, L, L), entry by entry."""
    weights = working(torch.einsum("bihn,bjhn->bhij", q, k))
    if gates.logs is not None:
        below = gate_sums(gates.delayed(gates.forward_gate_offset), q.shape[1])
        above = gate_sums(gates.delayed(1 - gates.gate_offset), q.shape[1]).mT
        weights = weights * (below + above).exp()  # each is 0 where the other is not
    return weights


def lion_matrix(q: Tensor, k: Tensor, gates: LionGates, eps: float) -> Tensor:
    """The mixer with its rows normalised, (B, H, L, L), entry by entry."""
    weights = lion_weights(q, k, gates)
    return weights / (weights.sum(-1, keepdim=True) + eps)


def lion(
    form: str, q: Tensor, k: Tensor, v: Tensor, gates: LionGates, eps: float, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Y by one of the forms: "attention", O(L^2), which knows no documents; "chunked", attention inside chunks and
    states between them, O(L); "recurrent", token by token."""
    if form == "attention":
        assert cu_seqlens is None, "the attention form is called for one document at a time"
        return torch.einsum("bhij,bjhp->bihp", lion_matrix(q, k, gates, eps).to(v.dtype), v)
    if form == "recurrent":
        y, sums = lion_recurrence(q, k, v, gates, cu_seqlens)
        return (y / (sums + eps).unsqueeze(-1)).to(v.dtype)
    return quasiseparable_scan(
        v, q, k, q, k, gates.delayed(gates.forward_gate_offset, cu_seqlens), gates.logs, shift=False,
        self_term="mean", normalize="row_sum", eps=eps, gate_offset=gates.gate_offset, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def lion_sums(form: str, q: Tensor, k: Tensor, v: Tensor, gates: LionGates) -> tuple[Tensor, Tensor]:
    """(Q K^T * M) V (B, L, H, P) and the row sums of Q K^T * M (B, L, H), in float32 at least, by one of the forms:
    what several masks are added by before rows are divided."""
    q, k, v = working(q), working(k), working(v)
    if form == "attention":
        weights = lion_weights(q, k, gates)
        return torch.einsum("bhij,bjhp->bihp", weights, v), weights.sum(-1).transpose(1, 2)
    if form == "recurrent":
        return lion_recurrence(q, k, v, gates)
    # A row's sum is what it makes of ones.
    sums = quasiseparable_scan(
        F.pad(v, (0, 1), value=1.0), q, k, q, k, gates.delayed(gates.forward_gate_offset), gates.logs, shift=False,
        self_term="mean", gate_offset=gates.gate_offset,
    )  # fmt: skip
    return sums[..., :-1], sums[..., -1]


class LionState(NamedTuple):
    """The state that one direction carries from token to token, in float32 at least."""

    products: Tensor
    """S (B, H, N, P): sum of k v^T over the tokens so far, decayed."""
    keys: Tensor
    """z (B, H, N): sum of k, decayed alike."""
    log_gate: Tensor
    """(B, H): the gate of the last token, for directions in which it acts one step later."""


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


def lion_recurrence(
    q: Tensor, k: Tensor, v: Tensor, gates: LionGates, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The numbers of `lion_sums` by two passes over the tokens, each with a state of constant size; between the passes
    only what the first gives for each token is kept."""
    (batch, length, nheads, d_state), exact = q.shape, torch.promote_types(v.dtype, torch.float32)
    shapes = ((d_state, v.shape[-1]), (d_state,), ())
    empty = LionState(*(v.new_zeros(batch, nheads, *shape, dtype=exact) for shape in shapes))
    first = last = None
    if cu_seqlens is not None:
        positions = torch.arange(length, device=q.device)
        first, last = torch.isin(positions, cu_seqlens), torch.isin(positions + 1, cu_seqlens)

    def direction(order: range, edges: Tensor | None, delayed: bool) -> list[Tensor]:
        state, given = empty, {}
        for t in order:
            if edges is not None:  # where a document begins in this direction, both sums start again
                state = LionState(*(part.masked_fill(edges[t], 0) for part in state))
            gate = gates.logs[:, t] if gates.logs is not None and gates.logs.dim() == 3 else gates.logs
            *given[t], state = lion_step(q[:, t], k[:, t], v[:, t], gate, state, delayed=delayed)
        return [torch.stack(parts, 1) for parts in zip(*(given[t] for t in range(length)), strict=True)]

    y_forward, c_forward = direction(range(length), first, gates.forward_gate_offset == 1)
    y_backward, c_backward = direction(range(length - 1, -1, -1), last, gates.gate_offset == 1)
    return y_forward + y_backward, c_forward + c_backward
