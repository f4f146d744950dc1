"""The ranks that one sequence is cut over, each with a part of its tokens, and what they send each other.

With a context, operations and mixers are given a part of a row of N L tokens: L of them, those of rank r from the token
r L on. `cu_seqlens` (see `documents`) then counts from the part's own first token: a document that began on an earlier
rank begins below 0, and one that goes on ends above L. Without `cu_seqlens` every row is one document over all ranks.

All ranks of a context call the same operations in the same order, forward and backward. Operations name a context by
its process group's name, which torch.library takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from matmix.kernels.functions import working_dtype


class Context(NamedTuple):
    """The ranks that a sequence is cut over, as one of them sees it."""

    name: str
    """Of the process group, in the order of the parts."""
    rank: int
    """Which part of the sequence is here."""
    size: int
    """The number of parts."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Context:
        return cls(group.group_name, dist.get_rank(group), dist.get_world_size(group))

    @classmethod
    def named(cls, name: str) -> Context | None:
        """Returns the context of the group of this name; None for ""."""
        return cls.of(dist.distributed_c10d._resolve_process_group(name)) if name else None

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._resolve_process_group(self.name)


def context_name(context: Context | None) -> str:
    """Returns what operations call a context by."""
    return "" if context is None else context.name


# -- documents that parts cut ---------------------------------------------------------------------------------------


def within_part(cu_seqlens: Tensor | None, seqlen: int) -> Tensor | None:
    """Returns the boundaries of what documents have of a part of `seqlen` tokens: from 0 to seqlen."""
    return None if cu_seqlens is None else cu_seqlens.clamp(0, seqlen)


class Crossing(NamedTuple):
    """Which documents cross the edges of a part: bool tensors without dimensions, or None where all rows do."""

    left: Tensor | None
    """The first token's document began on an earlier rank."""
    right: Tensor | None
    """The last token's document goes on on a later rank."""
    through: Tensor | None
    """One document crosses both edges."""

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, seqlen: int) -> Crossing:
        """No value is read on the host."""
        if cu_seqlens is None:
            return cls(None, None, None)
        inside = (cu_seqlens >= 0) & (cu_seqlens <= seqlen)
        return cls(~(cu_seqlens == 0).any(), ~(cu_seqlens == seqlen).any(), ~inside.any())


def where_crossing(crossing: Tensor | None, x: Tensor) -> Tensor:
    """Returns x where documents cross an edge, else zeros, also in place of NaN."""
    return x if crossing is None else torch.where(crossing, x, torch.zeros((), dtype=x.dtype, device=x.device))


def held(context: Context, cu_seqlens: Tensor | None, seqlen: int, first: bool, like: Tensor) -> Tensor:
    """Which documents, or rows, have their first (last) token in this part of `seqlen` tokens: bool (documents,) or
    (1,). Of those without tokens both are where such a token would be."""
    last_part = context.rank == context.size - 1
    if cu_seqlens is None:
        return torch.full((1,), context.rank == 0 if first else last_part, device=like.device)
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    begins = (starts >= 0) & ((starts < seqlen) | last_part)
    return begins if first else torch.where(starts == ends, begins, (ends > 0) & (ends <= seqlen))


# -- what ranks send each other -------------------------------------------------------------------------------------


class Gathering:
    """An all-gather under way: small floating tensors of all ranks, sent as one buffer of the first one's type."""

    def __init__(self, context: Context, *tensors: Tensor) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        self.sent = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors])
        self.received = self.sent.new_empty(context.size * self.sent.numel())
        self.work = dist.all_gather_into_tensor(self.received, self.sent, group=context.group, async_op=True)

    def wait(self) -> list[Tensor]:
        """Returns each tensor of all ranks, (ranks, ...), in their order."""
        self.work.wait()
        rows = self.received.view(-1, self.sent.numel())
        parts = rows.split([shape.numel() for shape in self.shapes], 1)
        return [part.unflatten(1, shape or (1,)) for part, shape in zip(parts, self.shapes, strict=True)]


def carried(added: Tensor, log_passed: Tensor, rank: int, rightwards: bool) -> Tensor:
    """Returns the state that enters a rank's part: state_{r+1} = exp(log_passed_r) state_r + added_r from zero on.

    added (ranks, *heads, ...): what each part adds to the state behind it; log_passed (ranks, *heads): the sum of its
    log-decays, -inf where a document ends in it. rightwards: from the first rank to the last one, else back.
    """
    added, log_passed = (x[:rank] if rightwards else x[rank + 1 :].flip(0) for x in (added, log_passed))
    if not len(added):
        return added.new_zeros(added.shape[1:])
    # Of the parts between: none behind the last one.
    later = torch.cat([log_passed[1:], torch.zeros_like(log_passed[:1])])
    weight = later.flip(0).cumsum(0).flip(0).exp().to(added.dtype)
    weight = weight.reshape(*weight.shape, *[1] * (added.dim() - weight.dim()))
    # What nothing comes through from may be NaN.
    return (weight * added.masked_fill(weight == 0, 0)).sum(0)


def from_neighbours(context: Context, to_left: Tensor | None, to_right: Tensor | None) -> tuple[Tensor | None, ...]:
    """Sends a tensor to the rank before and one to the rank behind this one; None, on all ranks, is not sent. Returns
    what came from the left (shaped like `to_right`) and from the right; zeros at the ends of the sequence."""
    operations, received, kept = [], [], []
    for sent, step in ((to_right, 1), (to_left, -1)):
        if sent is None:
            received.append(None)
            continue
        kept.append(sent.contiguous())
        received.append(torch.zeros_like(kept[-1]))
        target, source = context.rank + step, context.rank - step
        if 0 <= target < context.size:
            operations.append(dist.P2POp(dist.isend, kept[-1], group=context.group, group_peer=target))
        if 0 <= source < context.size:
            operations.append(dist.P2POp(dist.irecv, received[-1], group=context.group, group_peer=source))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return received[0], received[1]


# Registered, as they have to stay whole under torch.compile, and called by their names, so that exports, which copy the
# code that theirs calls, register nothing.


def shares(total: int, ranks: int) -> list[int]:
    """Returns how many of `total` heads or tokens each rank gets: as many as the last one, or one more."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def share(total: int, context: Context) -> slice:
    """Returns which of them this rank gets."""
    counts = shares(total, context.size)
    first = sum(counts[: context.rank])
    return slice(first, first + counts[context.rank])


@torch.library.custom_op(
    "matmix::exchanged", mutates_args=(), schema="(Tensor x, int cut, int join, SymInt joined, str context) -> Tensor"
)
def _exchanged(x: Tensor, cut: int, join: int, joined: int, context: str) -> Tensor:
    ranks = Context.named(context)
    slices = [one.movedim(join, 0) for one in x.split(shares(x.shape[cut], ranks.size), cut)]
    sent = torch.cat([one.reshape(-1) for one in slices])
    received = sent.new_empty(joined, *slices[ranks.rank].shape[1:])
    coming = [len(part) * received[0].numel() for part in received.split(shares(joined, ranks.size))]
    going = [one.numel() for one in slices]
    dist.all_to_all_single(received.view(-1), sent, coming, going, group=ranks.group)
    return received.movedim(0, join).contiguous()


@_exchanged.register_fake
def _(x: Tensor, cut: int, join: int, joined: int, context: str) -> Tensor:
    shape = list(x.shape)
    own = share(shape[cut], Context.named(context))
    shape[cut], shape[join] = own.stop - own.start, joined
    return x.new_empty(shape)


def _exchanged_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, ctx.cut, ctx.join, _, ctx.context = inputs
    ctx.whole = x.shape[ctx.cut]


def _exchanged_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _exchanged(gradient, ctx.join, ctx.cut, ctx.whole, ctx.context), None, None, None, None


_exchanged.register_autograd(_exchanged_back, setup_context=_exchanged_setup)


def exchanged(x: Tensor, cut: int, join: int, context: Context, joined: int | None = None) -> Tensor:
    """Cuts x along the dimension `cut` as `share` does and sends each rank its slice (an all-to-all): returns one slice
    of the parts of all ranks, one after the other along `join`; differentiable.

    joined: the length of all parts along `join`, which `share` has made; None where they are as long as this one. With
    `cut` and `join` changed round, and the first length along `cut`, it is undone.
    """
    joined = context.size * x.shape[join] if joined is None else joined
    return torch.ops.matmix.exchanged(x, cut, join, joined, context.name)


@torch.library.custom_op("matmix::gathered", mutates_args=(), schema="(Tensor x, int dim, str context) -> Tensor")
def _gathered(x: Tensor, dim: int, context: str) -> Tensor:
    ranks = Context.named(context)
    x = x.movedim(dim, 0).contiguous()
    whole = x.new_empty(ranks.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x, group=ranks.group)
    return whole.movedim(0, dim).contiguous()


@_gathered.register_fake
def _(x: Tensor, dim: int, context: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= Context.named(context).size
    return x.new_empty(shape)


def _gathered_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.context = inputs


def _gathered_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    # A reduce-scatter as an all-to-all: as many bytes, and bfloat16 is added in float32.
    ranks = Context.named(ctx.context)
    own = _exchanged(gradient.unsqueeze(0), 1 + ctx.dim, 0, ranks.size, ctx.context)
    return own.sum(0, dtype=working_dtype(own)).to(own.dtype), None, None


_gathered.register_autograd(_gathered_back, setup_context=_gathered_setup)


def gathered(x: Tensor, dim: int, context: Context) -> Tensor:
    """Returns the parts of all ranks, shaped alike, one after the other along `dim`; differentiable: the gradient of a
    part is the sum of what all ranks have for it."""
    return torch.ops.matmix.gathered(x, dim, context.name)


@torch.library.custom_op(
    "matmix::from_neighbour", mutates_args=(), schema="(Tensor x, int step, str context) -> Tensor"
)
def _from_neighbour(x: Tensor, step: int, context: str) -> Tensor:
    left, right = from_neighbours(Context.named(context), *((None, x) if step > 0 else (x, None)))
    return left if step > 0 else right


@_from_neighbour.register_fake
def _(x: Tensor, step: int, context: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _from_neighbour_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.step, ctx.context = inputs


def _from_neighbour_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _from_neighbour(gradient, -ctx.step, ctx.context), None, None


_from_neighbour.register_autograd(_from_neighbour_back, setup_context=_from_neighbour_setup)


def from_left(x: Tensor, context: Context) -> Tensor:
    """Returns x of the rank before this one, shaped alike on all, and zeros on the first; differentiable."""
    return torch.ops.matmix.from_neighbour(x, 1, context.name)


def from_right(x: Tensor, context: Context) -> Tensor:
    """Returns x of the rank behind this one, and zeros on the last; differentiable."""
    return torch.ops.matmix.from_neighbour(x, -1, context.name)


# -- whole rows of some heads in place of parts of rows of all, for what knows no way to go on from part to part ----


def whole_boundaries(cu_seqlens: Tensor | None, seqlen: int, context: Context) -> Tensor | None:
    """Returns the boundaries of the documents of the whole row, (ndocs + 1,) int32, from those of this part of `seqlen`
    tokens. One byte for each token is gathered; waits for the device."""
    if cu_seqlens is None:
        return None
    inside = (cu_seqlens >= 0) & (cu_seqlens < seqlen)
    starts = torch.zeros(seqlen + 1, dtype=torch.uint8, device=cu_seqlens.device)
    starts[torch.where(inside, cu_seqlens, seqlen).long()] = 1
    whole = gathered(starts[:-1], 0, context)
    last = torch.full((1,), len(whole), dtype=torch.int32, device=whole.device)
    return torch.cat((whole.nonzero().squeeze(1).to(torch.int32), last))


def over_heads(
    run: Callable[..., Tensor], context: Context | None, cu_seqlens: Tensor | None, *parts: Tensor
) -> Tensor:
    """Runs `run` for whole rows: with a context, each rank does so for its share of the heads, between two all-to-alls.

    Args:
        run: called as run(*rows, cu_seqlens, heads), rows (B, all tokens, heads, width) of each part, the boundaries of
            all documents, and which heads, a slice; returns what is shaped like the rows of the first part. Not called
            where ranks are more than heads and none is left for this one.
        context: the ranks, each with an equal part of the tokens; None = the rows are whole.
        cu_seqlens: of this part.
        parts: (B, L, H, width) each, of one dtype.

    Returns: (B, L, H, width) shaped like the first part; with a context also typed so.
    """
    if context is None:
        return run(*parts, cu_seqlens, slice(None))
    like, (length, heads) = parts[0], parts[0].shape[1:3]
    rows = exchanged(torch.cat(parts, -1), 2, 1, context).split([part.shape[-1] for part in parts], -1)
    boundaries = whole_boundaries(cu_seqlens, length, context)
    y = run(*rows, boundaries, share(heads, context)).to(like.dtype) if rows[0].shape[2] else rows[0]
    return exchanged(y, 1, 2, context, joined=heads)


def over_heads_here(run: Callable[..., Tensor], context: None, cu_seqlens: Tensor | None, *parts: Tensor) -> Tensor:
    """`over_heads` without a context."""
    return run(*parts, cu_seqlens, slice(None))
