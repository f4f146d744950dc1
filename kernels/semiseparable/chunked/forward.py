"""The matrices of chunks, the forward pass of the chunked scans, for one direction or two, and a single token."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.functions import outside_autocast, working_dtype
from matmix.kernels.semiseparable.chunked.setup import (
    ScanSetup,
    SideStates,
    add_entering,
    chunk_blocks,
    entering_states,
    send_states,
    set_up_scan,
    spread_heads,
    ungrouped_rows,
)
from matmix.kernels.semiseparable.context import edge_row
from matmix.kernels.semiseparable.form import LARGEST_LOG_DECAY, ScanCall, ScanOutput, ScanSide


class ChunkMatrices(NamedTuple):
    """Some chunks' matrices in factors: matrix = decays * weights, weights = scores * input scales."""

    pairs: list[tuple[Tensor, Tensor]]
    """q and k of each side, (m, ngroups, chunk, d_state)."""
    scores: list[Tensor]
    """q k^T of each side, (m, ngroups, chunk, chunk), with the side's mask."""
    decays: Tensor
    """(m, nheads, chunk, chunk), at most 1 everywhere; what exceeds that is part of the masks."""
    weights: Tensor
    """(m, nheads, chunk, chunk), or one head per group where no side has input scales."""


def chunk_matrices(setup: ScanSetup, at: slice, heads: int) -> ChunkMatrices:
    pairs, scores = [], []
    for number, side in enumerate(setup.sides):
        q = side.q[at].to(setup.dtype).transpose(1, 2).contiguous()
        k = side.k[at].to(setup.dtype).transpose(1, 2).contiguous()
        pairs.append((q, k))
        scores.append((q @ k.mT).mul_(block_mask(setup, at, number)))
    first, *second = setup.decays
    decays = first.log_matrix(at)
    if second:
        # Each side's is at most 0 in its own triangle and at least 0 in the other: their minimum takes each
        # triangle from its side.
        torch.minimum(decays, second[0].log_matrix(at), out=decays)
    # Outside the masks there can be a large positive number: never exponentiate that.
    decays.clamp_(max=0).exp_()
    if all(scale is None for scale in setup.scales):
        return ChunkMatrices(pairs, scores, decays, sum(scores[1:], scores[0]))
    weights = torch.zeros_like(decays)
    grouped = weights.unflatten(1, (setup.groups, -1))
    for side_scores, scale in zip(scores, setup.scales, strict=True):
        if scale is None:
            grouped += side_scores.unsqueeze(2)
        else:
            columns = scale_columns(scale, at).unflatten(1, (setup.groups, -1)).unsqueeze(-2)
            grouped.addcmul_(side_scores.unsqueeze(2), columns)
    return ChunkMatrices(pairs, scores, decays, weights)


def scale_columns(scale: Tensor, at: slice) -> Tensor:
    """Input scales of some chunks, (M, chunk, nheads) -> (m, nheads, chunk), contiguous."""
    return scale[at].transpose(1, 2).contiguous()


def block_mask(setup: ScanSetup, at: slice, number: int) -> Tensor:
    """One side's mask for some chunks, (m or 1, 1, chunk, chunk)."""
    mask = setup.masks[number]
    return (mask[at] if mask.shape[0] > 1 else mask).unsqueeze(1)


def multiply_by_group(x: Tensor, factor: Tensor) -> Tensor:
    """x (m, nheads, chunk, chunk) times a factor of each head or of each group of heads, in place."""
    if factor.shape[1] == x.shape[1]:
        return x.mul_(factor)
    x.unflatten(1, (factor.shape[1], -1)).mul_(factor.unsqueeze(2))
    return x


def own_terms(setup: ScanSetup, pairs: list[tuple[Tensor, Tensor]], heads: int) -> list[Tensor] | None:
    """Returns each side's own terms q_t . k_t, weighted, (m, nheads, chunk) before input scales; None where the masks
    hold them or nothing does."""
    if not setup.own_weight:
        return None
    share = heads // setup.groups
    return [(q * k).sum(-1).mul_(setup.own_weight).repeat_interleave(share, 1) for q, k in pairs]


def token_factor(setup: ScanSetup, at: slice, own: list[Tensor] | None, diagonal: Tensor | None) -> Tensor | None:
    """Returns the factor (m, nheads, chunk) of a token's value in its own output.

    diagonal (M, chunk, nheads).
    """
    factor = None if diagonal is None else diagonal[at].transpose(1, 2)
    for term, scale in zip(own or (), setup.scales, strict=False):
        term = term if scale is None else term * scale[at].transpose(1, 2)
        factor = term if factor is None else factor + term
    return factor


def undecayed_columns(matrix: Tensor, exclusive: bool, reverse: bool, sides: int) -> Tensor:
    """Column sums of the entries that hold no decay: (m, nheads, chunk, chunk) -> (m, nheads, chunk)."""
    if exclusive:
        column = matrix.diagonal(offset=1 if reverse else -1, dim1=-2, dim2=-1)
        return pad(column, (1, 0) if reverse else (0, 1))
    if sides == 2:
        return torch.zeros_like(matrix[..., 0])
    return matrix.diagonal(dim1=-2, dim2=-1)


@outside_autocast
def scan_forward(call: ScanCall, final_state: bool) -> ScanOutput:
    """Computes the scan of one direction or two; `final_state` asks for the last state of each."""
    v, sides, diagonal, form, *_ = call
    if form.normalize:
        y, finals = linear_forward(call._replace(v=with_ones(v)), final_state)
        row_sum = y[..., -1].contiguous()
        exact = y[..., :-1] / (row_sum + form.eps).unsqueeze(-1)
        y = exact.to(v.dtype)
        return ScanOutput(y, row_sum, finals, None if y.dtype == exact.dtype else (exact - y).to(v.dtype))
    if form.combine == "add" or len(sides) == 1:
        y, finals = linear_forward(call, final_state)
        return ScanOutput(y, None, finals)
    exact = v
    if form.combine == "mult":
        exact = v.to(working_dtype(v))
        call = call._replace(v=exact, diagonal=None)
    (y, first), (other, second) = (linear_forward(call._replace(sides=(side,)), final_state) for side in sides)
    finals = (*first, *second) if final_state else None
    if form.combine == "concat":
        return ScanOutput(torch.cat([y, other], -1), None, finals)
    y.mul_(other)
    if diagonal is not None:
        y.addcmul_(diagonal.to(y.dtype).unsqueeze(-1), exact)
    return ScanOutput(y.to(v.dtype), None, finals)


def with_ones(v: Tensor) -> Tensor:
    """Values with a column of ones, whose output is the sum of each row of the mixer."""
    v = v.to(working_dtype(v))
    return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)


def all_states(
    chunks: Tensor, setup: ScanSetup, given: tuple[ScanSide, ...], final_state: bool
) -> list[SideStates | None]:
    """The states of all directions; None where no state passes a chunk and none is asked for. given: the directions as
    the scan was given them. In a part q gets the rows of the neighbours, where it is shifted."""
    states, passing = [], []
    for number, (side, carries) in enumerate(zip(given, setup.carries, strict=True)):
        states.append(entering_states(chunks, setup, number) if carries or final_state else None)
        if setup.part is not None:
            # Under way while the next direction's states are computed.
            row = edge_row(side.q, not side.reverse) if setup.exclusive else None
            passing.append(send_states(setup, side, states[-1], row))
    for number, under_way in enumerate(passing):
        entering, row = under_way.wait()
        states[number] = add_entering(setup, number, states[number], entering)
        if row is not None:
            setup.layout.put_edge(setup.sides[number].q, row, given[number].reverse)
    return states


def linear_forward(call: ScanCall, final_state: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Returns the sum of all sides, shaped like v, and, if asked for, the final state of each side."""
    setup = set_up_scan(call, final_state)
    layout, dtype = setup.layout, setup.dtype
    heads = call.v.shape[2]
    chunks = layout.split(call.v)
    states = all_states(chunks, setup, call.sides, final_state)
    finals = tuple(setup.own_ends(of_side) for of_side in states) if final_state else None
    diagonal = spread_heads(call.diagonal, layout, dtype)
    y = torch.empty_like(chunks, memory_format=torch.contiguous_format)
    for at in chunk_blocks(setup):
        values = chunks[at].to(dtype).transpose(1, 2).contiguous()
        pairs, _, matrix, weights = chunk_matrices(setup, at, heads)
        out = multiply_by_group(matrix, weights) @ values
        factor = token_factor(setup, at, own_terms(setup, pairs, heads), diagonal)
        if factor is not None:
            out.addcmul_(factor.unsqueeze(-1), values)
        out = out.transpose(1, 2)
        for (q, _), of_side, decay, carries in zip(pairs, states, setup.decays, setup.carries, strict=True):
            if carries:
                out.addcmul_(ungrouped_rows(q @ of_side.chunks[at], heads), decay.enter[at].unsqueeze(-1))
        y[at] = out
    return layout.join(y), finals


class ScanStepInputs(NamedTuple):
    """The arguments of matmix::semiseparable_step."""

    v: Tensor
    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    state: Tensor
    input_scale: Tensor | None = None
    diagonal: Tensor | None = None


@outside_autocast
def step_forward(given: ScanStepInputs, in_place: bool) -> tuple[Tensor, Tensor]:
    """y (batch, nheads, headdim) typed like v, and the new state, with `in_place` in the memory of the given one."""
    v, q, k, log_decay, state, input_scale, diagonal = given
    groups, exact = q.shape[1], state.dtype
    values = v.to(exact)
    written = values if input_scale is None else values * input_scale.to(exact).unsqueeze(-1)
    # The heads of a group side by side: they share q and k, which are not copied.
    h, shares = state.unflatten(1, (groups, -1)), (groups, v.shape[1] // groups)
    if log_decay is not None:
        decay = log_decay.to(exact).clamp(max=LARGEST_LOG_DECAY).exp().unflatten(-1, shares)[..., None, None]
        h = h.mul_(decay) if in_place else h * decay
    k, written = k.to(exact)[:, :, None, :, None], written.unflatten(1, shares).unsqueeze(-2)
    h = h.addcmul_(k, written) if in_place else torch.addcmul(h, k, written)
    y = (q.to(exact)[:, :, None, None, :] @ h).squeeze(-2).flatten(1, 2)
    if diagonal is not None:
        y = y + diagonal.to(exact).unsqueeze(-1) * values
    return y.to(v.dtype), h.flatten(1, 2)


def semiseparable_step_torch(
    *tensors: Tensor | None, in_place: bool = False, **options: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`semiseparable_step` in PyTorch, without argument checks; see there."""
    return step_forward(ScanStepInputs(*tensors, **options), in_place)
