"""Backward pass of the chunked scans, for one direction or two."""

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.documents import shift_left, shift_right
from matmix.kernels.functions import outside_autocast, working_dtype
from matmix.kernels.semiseparable.chunked.decay import SideDecay, side_decay_backward, widest_dtype
from matmix.kernels.semiseparable.chunked.forward import (
    all_states,
    block_mask,
    chunk_matrices,
    multiply_by_group,
    own_terms,
    scale_columns,
    token_factor,
    undecayed_columns,
    with_ones,
)
from matmix.kernels.semiseparable.chunked.setup import (
    ScanSetup,
    SideStates,
    add_entering,
    chunk_blocks,
    grouped_rows,
    pass_side,
    reduce_like,
    send_states,
    set_up_scan,
    spread_heads,
    ungrouped_rows,
)
from matmix.kernels.semiseparable.context import edge_gradient, edge_row
from matmix.kernels.semiseparable.form import LARGEST_LOG_DECAY, ScanCall, ScanGradients, ScanSide, SideGradients


class SidePasses(NamedTuple):
    """States of one direction in the backward pass, (M, ngroups, d_state, heads of the group * headdim)."""

    entering: Tensor
    """The state that enters each chunk."""
    leaving: Tensor
    """The gradient of the state that leaves each chunk."""
    initial: Tensor
    """The gradient of the initial state, in the op's shape."""
    edge: Tensor | None
    """What the next rank's gradient of q is at the token before its own, with shift; (batch, ngroups, d_state)."""


class SideSums(NamedTuple):
    """Gradients of one direction while they are summed, chunk by chunk."""

    q: Tensor
    k: Tensor
    scale: Tensor | None
    row: Tensor
    """(M, chunk, nheads): of the decay exponents where rows read."""
    col: Tensor
    """(M, chunk, nheads): of the decay exponents where columns write, with the opposite sign."""
    leave: Tensor | None
    """(M, chunk, nheads): of the exponents from columns to the chunk's edge."""
    total: Tensor | None
    """(M, nheads): of the exponent over the whole chunk."""
    states: SidePasses | None


@outside_autocast
def scan_backward(
    dy: Tensor, drow_sum: Tensor | None, dfinals: tuple[Tensor | None, ...] | None, call: ScanCall
) -> ScanGradients:
    """Returns the gradients of the linear scan, combined by "add" or "concat".

    dy: cotangent of the output before any normalisation; drow_sum (batch, seqlen, nheads): of the sums of the
    mixer's rows, or None; dfinals: of each direction's final state, or None; None where there are no final states.
    """
    if call.form.combine == "concat" and len(call.sides) == 2:
        first, second = (
            linear_backward(half, None if dfinals is None else dfinals[at : at + 1], call._replace(sides=(side,)))
            for at, (half, side) in enumerate(zip(dy.chunk(2, -1), call.sides, strict=True))
        )
        ddiagonal = None if first.diagonal is None else first.diagonal + second.diagonal
        return ScanGradients(first.v + second.v, first.sides + second.sides, ddiagonal)
    if drow_sum is None:
        return linear_backward(dy, dfinals, call)
    exact = working_dtype(call.v)
    dy = torch.cat([dy.to(exact), drow_sum.to(exact).unsqueeze(-1)], -1)
    gradients = linear_backward(dy, dfinals, call._replace(v=with_ones(call.v)))
    return gradients._replace(v=gradients.v[..., :-1].to(call.v.dtype, memory_format=torch.contiguous_format))


def linear_backward(dy: Tensor, dfinals: tuple[Tensor | None, ...] | None, call: ScanCall) -> ScanGradients:
    """Returns the gradients of `linear_forward`."""
    v, sides, diagonal, cu_seqlens = call.v, call.sides, call.diagonal, call.bounds
    setup = set_up_scan(call, dfinals is not None, dy)
    layout, dtype = setup.layout, setup.dtype
    chunks, dout = layout.split(v), layout.split(dy)
    states = both_passes(chunks, dy, dout, setup, sides, dfinals)
    sums = [side_sums(setup, number, of_side, v.shape[2]) for number, of_side in enumerate(states)]
    spread = spread_heads(diagonal, layout, dtype)
    ddiagonal = None if spread is None else torch.empty(spread.shape, dtype=dtype, device=v.device)
    dv = torch.empty_like(chunks, memory_format=torch.contiguous_format)
    for at in chunk_blocks(setup):
        values, grad = chunks[at].to(dtype), dout[at].to(dtype)
        dv[at], along = block_backward(setup, at, values, grad, spread, sums)
        if ddiagonal is not None:
            ddiagonal[at] = along.transpose(1, 2)

    gradients = tuple(
        side_gradients(setup, side, setup.decays[number], sums[number], cu_seqlens) for number, side in enumerate(sides)
    )
    if ddiagonal is not None:
        ddiagonal = reduce_like(layout.join(ddiagonal), diagonal)
    return ScanGradients(layout.join(dv), gradients, ddiagonal)


def both_passes(
    chunks: Tensor,
    dy: Tensor,
    dout: Tensor,
    setup: ScanSetup,
    given: tuple[ScanSide, ...],
    dfinals: tuple[Tensor | None, ...] | None,
) -> list[SidePasses | None]:
    """The states of all directions computed again, and their cotangents; None where no state passes a chunk. dout: dy
    in chunks; given: the directions as the scan was given them."""
    dfinals = dfinals or (None,) * len(given)
    final_state = any(dfinal is not None for dfinal in dfinals)
    states, leaving, passing = all_states(chunks, setup, given, final_state), [], []
    for number, (side, of_side) in enumerate(zip(given, states, strict=True)):
        if of_side is None:
            leaving.append(None)
            continue
        leaving.append(cotangents(dout, setup, number, dfinals[number], torch.empty_like(of_side.chunks)))
        if setup.part is not None:
            row = None
            if setup.exclusive:
                row = edge_gradient(of_side.entered, edge_row(dy, side.reverse), setup.groups)
            passing.append(send_states(setup, side, leaving[number], row))
    edges = [None] * len(given)
    for number, under_way in enumerate(passing):
        entering, edges[number] = under_way.wait()
        add_entering(setup, number, leaving[number], entering)
    return [
        None if of_side is None else SidePasses(of_side.chunks, back.chunks, setup.own_ends(back), edge)
        for of_side, back, edge in zip(states, leaving, edges, strict=True)
    ]


def cotangents(dout: Tensor, setup: ScanSetup, number: int, dfinal: Tensor | None, into: Tensor) -> SideStates:
    """The gradients of the states that leave the chunks, of what `dout` and `dfinal` are gradients of."""
    side, decay = setup.sides[number], setup.decays[number]
    for at in chunk_blocks(setup):
        read = grouped_rows(dout[at].to(setup.dtype) * decay.enter[at].unsqueeze(-1), setup.groups)
        torch.matmul(side.q[at].to(setup.dtype).permute(0, 2, 3, 1), read, out=into[at])
    return pass_side(into, dfinal, setup, number, side.reverse)


def side_sums(setup: ScanSetup, number: int, states: SidePasses | None, heads: int) -> SideSums:
    side = setup.sides[number]
    shape = (*side.q.shape[:2], heads)
    wide = widest_dtype(side.q.device)

    def zeros(*shape: int, dtype: torch.dtype = setup.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=side.q.device)

    return SideSums(
        torch.empty_like(side.q, memory_format=torch.contiguous_format),
        torch.empty_like(side.k, memory_format=torch.contiguous_format),
        None if setup.scales[number] is None else zeros(*shape),
        zeros(*shape, dtype=wide),
        zeros(*shape, dtype=wide),
        None if states is None else zeros(*shape),
        None if states is None else zeros(shape[0], heads),
        states,
    )


def block_backward(
    setup: ScanSetup, at: slice, values: Tensor, grad: Tensor, diagonal: Tensor | None, sums: list[SideSums]
) -> tuple[Tensor, Tensor | None]:
    """Some chunks: their part of dv, (m, chunk, nheads, headdim), and dy . v per token where it is needed.

    What belongs to the directions is written into `sums`.
    """
    groups, heads = setup.groups, values.shape[2]
    values_h, grad_h = (x.transpose(1, 2).contiguous() for x in (values, grad))
    pairs, scores, decays, weights = chunk_matrices(setup, at, heads)
    dweights = (grad_h @ values_h.mT).mul_(decays)
    matrix = multiply_by_group(decays, weights)
    dv_h = matrix.mT @ grad_h
    dscores = []
    for number, scale in enumerate(setup.scales):
        by_head = dweights
        if scale is not None:
            by_head = torch.mul(dweights, scale_columns(scale, at).unsqueeze(-2), out=matrix)
        dscores.append(by_head.unflatten(1, (groups, -1)).sum(2).mul_(block_mask(setup, at, number)))
    # The derivative by the exponent of each entry, without its input scale.
    exponents = multiply_by_group(dweights, sum(scores[1:], scores[0]))

    own, along = own_terms(setup, pairs, heads), None
    factor = token_factor(setup, at, own, diagonal)
    if factor is not None:
        along = (grad_h * values_h).sum(-1)
        dv_h.addcmul_(factor.unsqueeze(-1), grad_h)

    dvalues = dv_h.transpose(1, 2)
    for number, (q, k) in enumerate(pairs):
        dq, dk = dscores[number] @ k, dscores[number].mT @ q
        if own is not None:
            down = along
            if setup.scales[number] is not None:
                sums[number].scale[at] += (along * own[number]).transpose(1, 2)
                down = along * scale_columns(setup.scales[number], at)
            down = down.unflatten(1, (groups, -1)).sum(2).unsqueeze(-1)
            dq.addcmul_(down, k, value=setup.own_weight)
            dk.addcmul_(down, q, value=setup.own_weight)
        block_exponents(setup, at, number, exponents, sums[number])
        if sums[number].states is not None:
            block_states(setup, at, number, (q, k, values, grad), (dq, dk, dvalues), sums[number])
        sums[number].q[at] = dq.transpose(1, 2)
        sums[number].k[at] = dk.transpose(1, 2)
    return dvalues, along


def block_exponents(setup: ScanSetup, at: slice, number: int, exponents: Tensor, sums: SideSums) -> None:
    """Gradients that one direction's decays and input scales get from inside the chunks.

    exponents (m, nheads, chunk, chunk): the derivative by each entry's exponent, without its input scale.
    """
    side, scale, offset = setup.sides[number], setup.scales[number], int(setup.exclusive)
    # Entries next to the diagonal (on it, without shift) hold no decay: what they would add to rows and take
    # from columns cancels only to rounding, far too much where the other entries have decayed.
    # Row and column sums are subtracted from each other further on: the same numbers, summed exactly.
    decayed = exponents.to(sums.row.dtype, copy=True)
    decayed = decayed.triu_(1 + offset) if side.reverse else decayed.tril_(-1 - offset)
    columns = decayed.sum(-2)
    if scale is not None:
        undecayed = undecayed_columns(exponents, setup.exclusive, side.reverse, len(setup.sides))
        sums.scale[at] += (columns + undecayed).transpose(1, 2)
        weight = scale_columns(scale, at).to(decayed.dtype)
        decayed.mul_(weight.unsqueeze(-2))
        columns = columns * weight
    sums.row[at] = decayed.sum(-1).transpose(1, 2)
    sums.col[at] = columns.transpose(1, 2)


def block_states(
    setup: ScanSetup, at: slice, number: int, given: tuple[Tensor, ...], gradients: tuple[Tensor, ...], sums: SideSums
) -> None:
    """One direction's gradients through states that enter and leave chunks, added to those in `gradients`."""
    (q, k, values, grad), (dq, dk, dvalues) = given, gradients
    decay, scale = setup.decays[number], setup.scales[number]
    heads, groups = values.shape[2], setup.groups
    entering, leaving = sums.states.entering[at], sums.states.leaving[at]

    read = ungrouped_rows(q @ entering, heads)
    weighted = grad * decay.enter[at].unsqueeze(-1)
    sums.row[at] += (read * weighted).sum(-1)
    dq += grouped_rows(weighted, groups) @ entering.mT

    written = ungrouped_rows(k @ leaving, heads)
    weight = decay.leave[at]
    along = (written * values).sum(-1) * weight
    if scale is not None:
        sums.scale[at] += along
        along, weight = along * scale[at], weight * scale[at]
    sums.leave[at] = along
    dk += grouped_rows(values * weight.unsqueeze(-1), groups) @ leaving.mT

    products = (entering * leaving).sum(2).unflatten(-1, (heads // groups, -1)).sum(-1)
    sums.total[at] = products.flatten(1) * decay.total[at]
    dvalues.addcmul_(written, weight.unsqueeze(-1))


def side_gradients(
    setup: ScanSetup, side: ScanSide, decay: SideDecay, sums: SideSums, cu_seqlens: Tensor | None
) -> SideGradients:
    """Converts the gradients that were summed over chunks to the shapes and dtypes of the op's arguments."""
    layout = setup.layout
    dq = layout.join(sums.q)
    if setup.exclusive:
        dq = shift_right(dq, cu_seqlens) if side.reverse else shift_left(dq, cu_seqlens)
        if setup.part is not None:
            edge_row(dq, not side.reverse).add_(sums.states.edge)
    dlog = dscale = dinitial = None
    if side.log_decay is not None:
        dlog = side_decay_backward(decay, sums.row, sums.col, sums.leave, sums.total, setup.exclusive)
        dlog = reduce_like(layout.join(dlog), side.log_decay)
        # Where values are not refused, larger decays are taken as the largest one, whatever they are.
        dlog.masked_fill_(side.log_decay > LARGEST_LOG_DECAY, 0.0)
    if side.input_scale is not None:
        dscale = layout.join(sums.scale).to(side.input_scale.dtype)
    if side.initial_state is not None:
        dinitial = sums.states.initial.to(side.initial_state.dtype)
    return SideGradients(dq, layout.join(sums.k), dlog, dscale, dinitial)
