"""Recurrences whose transition is a decay plus a matrix of rank one, in chunks.

The state of a head is H (N x P), written as keys times values: H_t = A_t H_{t-1} + k_t v_t^T, y_t = H_t^T r_t, with
A_t = diag(w_t) + b_t a_t^T. What a token erases depends on what was written before it; within a chunk that is a unit
triangular system (the WY or UT transform, arXiv 2406.06484, section 3), which is solved once for all columns that do
not depend on the entering state. A chunk is then an affine map of that state, and only one product of small matrices
per chunk is left that has to wait for the chunk before.

Ranks that hold parts of a document do the same once more: a part is an affine map of the state that enters it, one
gather of these maps gives every rank its own, and its chunks' states follow from the products of transitions before
them, which were carried along with the states from zero.

The systems are solved by substitution. The inverse by repeated squaring would be products only, but its powers grow
like binomial coefficients where keys repeat, and cancel.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.context import Context, within_part
from matmix.kernels.documents import ChunkLayout, chunk_layout
from matmix.kernels.functions import outside_autocast, working
from matmix.kernels.matrix_product.parts import Part, entering_part


class ChunkMaps(NamedTuple):
    """The affine maps by which M chunks of C tokens change the states H that enter them."""

    reads: Tensor
    """(M, heads, C, N): outputs are reads H + local."""
    local: Tensor
    """(M, heads, C, P)"""
    transition: Tensor
    """(M, heads, N, N): the state after the chunk is transition H + written."""
    written: Tensor
    """(M, heads, N, P)"""


@outside_autocast
def gated_delta_rule(
    inputs: tuple[Tensor, ...], chunk_size: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    context: Context | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """H_t = alpha_t (I - beta_t k_t k_t^T) H_{t-1} + beta_t k_t v_t^T, y_t = H_t^T q_t (arXiv 2412.06464, section 3).

    Args: inputs: q, k (B, L, heads, N), v (B, L, heads, P), beta and log alpha (B, L, heads); initial_state
        (B or documents, heads, N, P); cu_seqlens for packed documents (B = 1), read on the host; context: the ranks
        that hold the other parts.
    Returns: y (B, L, heads, P) and the last states (B or documents, heads, N, P), float32 at least. In a context
        initial states are taken where the first token of a row or document is, and last ones returned where its last
        one is, zeros elsewhere.
    """
    batch, length = inputs[0].shape[:2]
    part = Part.of(context, cu_seqlens, inputs[0])
    bounds = cu_seqlens if part is None else within_part(cu_seqlens, length)
    layout = chunk_layout(batch, length, min(chunk_size, length), bounds, aligned=True)
    q, k, v, beta, log_decay = (in_chunks(part, layout) for part in inputs)
    earlier = log_decay.new_ones(layout.chunk, layout.chunk).tril(-1)
    # Sums over s + 1 .. t, not differences of sums from the chunk's start: after a token that forgets almost all those
    # would be differences of large numbers.
    beta, log_decay = beta.unsqueeze(-1), log_decay.unsqueeze(-1)
    decay = (log_decay * earlier).cumsum(-2)
    decay = decay.masked_fill(earlier.mT.bool(), float("-inf")).exp()
    since_start = log_decay.cumsum(-2).exp()

    weighted = k * beta
    erased = (k @ weighted.mT * decay).tril(-1)
    right = torch.cat([v, k * since_start], -1)
    solved = torch.linalg.solve_triangular(erased, right, upper=False, unitriangular=True)
    # What is written is weighted^T (own - seen H): the values less what the state already answers to their keys.
    own, seen = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ weighted.mT * decay
    to_end = (weighted * decay[..., -1, :].unsqueeze(-1)).mT
    kept = torch.diag_embed(since_start[..., -1, :].expand(*k.shape[:2], k.shape[-1]))
    maps = ChunkMaps(q * since_start - scores @ seen, scores @ own, kept - to_end @ seen, to_end @ own)
    return run_chunks(maps, layout, initial_state, part)


@outside_autocast
def diagonal_delta_rule(
    inputs: tuple[Tensor, ...], chunk_size: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    context: Context | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """H_t = (diag(w_t) + b_t a_t^T) H_{t-1} + k_t v_t^T, y_t = H_t^T r_t (arXiv 2503.14456, section 4).

    Decays within a chunk are split into a factor at the reading and one at the writing token, so that the log decays
    of half a chunk must not add up to less than about -80.

    inputs: r, k (B, L, heads, N), v (B, L, heads, P), a, b and log w (B, L, heads, N). All else is as in
    `gated_delta_rule`.
    """
    batch, length = inputs[0].shape[:2]
    if length == 0:
        return working(inputs[2]), initial_state
    part = Part.of(context, cu_seqlens, inputs[0])
    bounds = cu_seqlens if part is None else within_part(cu_seqlens, length)
    layout = chunk_layout(batch, length, min(chunk_size, length), bounds, aligned=True)
    r, k, v, a, b, log_decay = (in_chunks(part, layout) for part in inputs)
    length, values = layout.chunk, v.shape[-1]
    total = log_decay.cumsum(-2)  # over 1 .. t
    before = total - log_decay  # a_t reads what is left of the state before token t decays it
    # Any reference gives the same products; from the middle the factors stay smallest.
    middle = total[..., length // 2, :].unsqueeze(-2).detach()
    reading = torch.cat([r * (total - middle).exp(), a * (before - middle).exp()], -2)
    writing = torch.cat([b, k], -2) * (middle - total).exp().repeat(1, 1, 2, 1)
    products = reading @ writing.mT
    read, erase = products.split(length, -2)
    read_b, read_k = (part.tril() for part in read.split(length, -1))
    erase_b, erase_k = (part.tril(-1) for part in erase.split(length, -1))

    right = torch.cat([erase_k @ v, a * before.exp()], -1)
    # Rows u_t = a_t^T H_{t-1}, which b_t is written with, are own + seen H.
    solved = torch.linalg.solve_triangular(-erase_b, right, upper=False, unitriangular=True)
    own, seen = solved.split([values, r.shape[-1]], -1)
    last = total[..., -1:, :]
    b_end, k_end = ((part * (last - total).exp()).mT for part in (b, k))
    maps = ChunkMaps(
        r * total.exp() + read_b @ seen,
        read_b @ own + read_k @ v,
        torch.diag_embed(last.squeeze(-2).exp()) + b_end @ seen,
        b_end @ own + k_end @ v,
    )
    return run_chunks(maps, layout, initial_state, part)


@outside_autocast
def delta_rule_step(
    state: Tensor, decay: Tensor, a: Tensor, b: Tensor, k: Tensor, v: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: state (B, heads, N, P); a, b, k, r (B, heads, N) and decay, the same or with one
    channel; v (B, heads, P). Returns y (B, heads, P) and the new state."""
    erased = torch.einsum("bhn,bhnp->bhp", a, state)
    state = decay.unsqueeze(-1) * state + b.unsqueeze(-1) * erased.unsqueeze(-2) + k.unsqueeze(-1) * v.unsqueeze(-2)
    return torch.einsum("bhn,bhnp->bhp", r, state), state


def in_chunks(x: Tensor, layout: ChunkLayout) -> Tensor:
    """(B, L, heads, ...) -> (M, heads, C, ...) in float32 at least; zeros beyond the ends of documents."""
    return layout.split(working(x)).transpose(1, 2)


def run_chunks(
    maps: ChunkMaps, layout: ChunkLayout, initial_state: Tensor | None, part: Part | None
) -> tuple[Tensor, Tensor]:
    """Outputs (B, L, heads, P) and the last state of each row or document.

    Documents start chunks of their own, and their n-th chunks are taken together, so that there are as many steps as
    the longest has chunks.
    """
    added = maps.written
    begun = added.new_zeros(len(layout.firsts) if layout.aligned else layout.rows, *added.shape[1:])
    begun = begun if initial_state is None else initial_state.to(begun.dtype)
    if part is not None:
        # Beside the states stand the products of transitions.
        identity = torch.eye(maps.transition.shape[-1], dtype=added.dtype, device=added.device)
        begun = torch.cat([part.own(begun, first=True), identity.expand(*begun.shape[:-1], -1)], -1)
        added = pad(added, (0, identity.shape[-1]))
    maps_of_states = maps.transition, added
    if layout.aligned:
        ends = enumerate(zip(layout.firsts, layout.lasts, strict=True))
        spans = sorted(((last - first + 1, first, n) for n, (first, last) in ends if first >= 0), reverse=True)
        chunks = [[first + n for count, first, _ in spans if count > n] for n in range(spans[0][0])]
        order, documents = (
            torch.tensor(places, device=begun.device)
            for places in (list(itertools.chain(*chunks)), [document for *_, document in spans])
        )
        transitions, written = (x.index_select(0, order).split([*map(len, chunks)]) for x in maps_of_states)
        state = begun.index_select(0, documents)
    else:
        transitions, written = (x.unflatten(0, (layout.rows, layout.per_row)).unbind(1) for x in maps_of_states)
        state = begun
    states, ended = [], []
    for transition, added in zip(transitions, written, strict=True):
        ended.append(state[len(added) :])  # longer documents come first
        state = state[: len(added)]
        states.append(state)
        state = transition @ state + added
    if layout.aligned:
        entering = torch.cat(states).index_select(0, order.argsort())
        state = begun.index_copy(0, documents, torch.cat([state, *reversed(ended)]))
    else:
        entering = torch.stack(states, 1).flatten(0, 1)
    if part is not None:
        left = entering_part(part.edge(state, 1), part)
        state = part.with_edge(state[..., : left.shape[-1]], 0, gone_on(part.edge(state, 0), left))
        state = part.own(state, first=False)
        count = 1 + min(last for last in layout.lasts if last >= 0) if layout.aligned else len(entering)
        left_of_each = left.repeat_interleave(1 if layout.aligned else layout.per_row, 0)
        entering = torch.cat([gone_on(entering[:count], left_of_each), entering[count:, ..., : left.shape[-1]]])
    return layout.join((maps.reads @ entering + maps.local).transpose(1, 2)), state


def gone_on(states: Tensor, entered: Tensor) -> Tensor:
    """States (..., N, P), from those from zero with the products of transitions beside them (..., N, P + N)."""
    own, product = states.split([entered.shape[-1], entered.shape[-2]], -1)
    return own + product @ entered


def unit_vectors(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / |x| over the last dimension, in float32 at least; near zero shorter than 1."""
    x = working(x)
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


@outside_autocast
def transition_matrix(transitions: Tensor, writes: Tensor, reads: Tensor) -> Tensor:
    """M[t, s] = r_t^T A_t ... A_{s+1} k_s for s <= t, else 0, (B, heads, L, L): A (B, L, heads, N, N), k and r."""
    writes, reads = writes.transpose(1, 2), reads.transpose(1, 2)
    length, rows = writes.shape[2], []
    arrived = torch.zeros_like(writes)  # row s: A_t ... A_{s+1} k_s
    for t in range(length):
        arrived = torch.einsum("bhij,bhsj->bhsi", transitions[:, t], arrived)
        arrived = torch.cat([arrived[:, :, :t], writes[:, :, t : t + 1], arrived[:, :, t + 1 :]], 2)
        rows.append(torch.einsum("bhsi,bhi->bhs", arrived, reads[:, :, t]))
    return torch.stack(rows, 2)
