"""Softmax attention of rows that ranks share: each has the queries, keys and values of an equal part of the tokens.

torch's own context parallelism (`torch.distributed.tensor.experimental.context_parallel`) is not used: it knows no
documents, and balances causal work by cutting a row into other parts than those that the scans beside it go on from.
"""

from typing import Any

import torch
from torch import Tensor

from matmix.kernels import gathered, over_heads
from matmix.kernels.context import Context
from matmix.model.mixers.attention.packed import attend, packed_attention


def numbers_received(tokens: int, nheads: int, key_width: int, value_width: int, ranks: int) -> tuple[int, int]:
    """Returns how many numbers a rank with a part of `tokens` tokens receives in the forward pass, and as many again in
    the backward pass: where it gets whole rows of its heads (queries, keys, values) and gives back what they attend to;
    and where it gets the keys and values of all tokens. Of the first the most that any rank receives."""
    own = -(-nheads // ranks)
    heads = (ranks - 1) * tokens * own * (2 * key_width + value_width) + tokens * (nheads - own) * value_width
    return heads, (ranks - 1) * tokens * nheads * (key_width + value_width)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, context: Context | None, cu_seqlens: Tensor | None, causal: bool, **options: Any
) -> Tensor:
    """`packed_attention`, with its options; with a context of parts q, k (B, L, H, D), v (B, L, H, P) -> (B, L, H, P).

    Ranks exchange tokens for heads, which also shares causal work equally, or gather all keys and values where ranks
    are more than heads or less is sent so.
    """
    if context is None:
        return packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, **options)
    length, nheads, width = q.shape[1:]
    options.pop("max_seqlen", None)  # of a part, which may be shorter than what documents have on all ranks
    by_heads, by_keys = numbers_received(length, nheads, width, v.shape[-1], context.size)
    if nheads < context.size or by_keys < by_heads:
        return gathered_attention(q, k, v, context, cu_seqlens, causal, **options)

    def whole(v: Tensor, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, _: slice) -> Tensor:
        return packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, **options)

    return over_heads(whole, context, cu_seqlens, v, q, k)


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, context: Context, cu_seqlens: Tensor | None, causal: bool, **options: Any
) -> Tensor:
    """`attention` with the keys and values of all ranks, of which each document's queries see its own only. The last
    rank has the most work, if causal. Reads cu_seqlens on the host."""
    # Imported late: it takes half a second, for torch's compiler.
    from torch.nn.attention.bias import causal_lower_right

    length = q.shape[1]
    first, last = context.rank * length, (context.rank + 1) * length
    k, v = gathered(torch.cat((k, v), -1), 1, context).split((k.shape[-1], v.shape[-1]), -1)

    def seen(start: int, end: int) -> Tensor:
        """The part's tokens of one document [start, end) of the whole row."""
        own = slice(max(start, first), min(end, last))
        keys = slice(start, own.stop if causal else end)
        asked = q[:, own.start - first : own.stop - first]
        mask = causal_lower_right(asked.shape[1], keys.stop - keys.start) if causal else None
        return attend(asked, k[:, keys], v[:, keys], mask=mask, **options)

    if cu_seqlens is None:
        return seen(0, context.size * length)
    bounds = [first + bound for bound in cu_seqlens.tolist()]
    inner = [bound for bound in bounds if first <= bound <= last]
    if not inner:
        return seen(bounds[0], bounds[-1])
    start, end = inner[0], inner[-1]
    own = torch.tensor(inner, dtype=torch.int32, device=q.device) - start
    parts = [part[:, start - at : end - at] for part, at in ((q, first), (k, 0), (v, 0))]
    y = [seen(bounds[0], start)] if start > first else []
    y.append(packed_attention(*parts, causal=causal, cu_seqlens=own, **options))
    if end < last:
        y.append(seen(end, bounds[-1]))
    return torch.cat(y, 1)
