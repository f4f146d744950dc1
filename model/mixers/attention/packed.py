"""softmax(q k^T) v of packed documents, also where each rank has the queries, keys and values of a part of the row.

torch's own context parallelism (torch.distributed.tensor.experimental, 2.11) is not used. Its ring of scaled dot
products takes no boundaries of documents; its flex attention takes them as a block mask, where parts are whole blocks
of 128 tokens, and gathers all keys and values as `gathered_attention` does. Both balance causal work by cutting a row
into other parts than those that the scans beside it go on from.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels import gathered, over_heads
from matmix.kernels.context import Context
from matmix.model.positions import by_documents

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch; the general form below serves every device
    varlen_attn = None


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    dropout: float = 0.0,
    window: int = 0,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v per head and document: q (B, L, H, D), k (B, L, K, D), v (B, L, K, P) -> (B, L, H, P).

    K divides H: H / K neighbouring heads of queries share keys and values. With a window a token attends to those at
    most so far away. With cu_seqlens (B == 1) it does so within its own document only, and not even NaN in another one
    reaches it. In half precision on CUDA that is one variable-length flash kernel; elsewhere documents of similar
    length (within a factor of 2) are padded together, so that at most half of the work is padding.
    """
    k, v = (of_each_head(part, q) for part in (k, v))
    width = max(q.shape[-1], v.shape[-1])
    flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    flash = flash and varlen_attn is not None and dropout == 0.0 and width % 8 == 0 and width <= 256
    if cu_seqlens is None and not (flash and window):
        return attend_near(q, k, v, window, causal=causal, dropout=dropout)
    if not flash:
        return attention_by_length(q[0], k[0], v[0], cu_seqlens, causal, dropout, window).unsqueeze(0)
    (batch, length), scale = q.shape[:2], q.shape[-1] ** -0.5
    if cu_seqlens is None:  # torch's other kernels know no window
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        max_seqlen = length
    longest = max_seqlen or int(cu_seqlens.diff().max())
    sides = (window or -1, 0 if causal else window or -1)
    parts = (part.flatten(0, 1) for part in of_one_width(q, k, v))
    y = varlen_attn(*parts, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=sides)
    return y[..., : v.shape[-1]].unflatten(0, (batch, length))


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """scaled_dot_product_attention of q (B, L, H, D), k (B, S, H, D), v (B, S, H, P) -> (B, L, H, P).

    Its flash kernels want D = P. With other widths it would fall back on a form that keeps the L x S matrix.
    """
    parts, scale = (part.transpose(1, 2) for part in of_one_width(q, k, v)), q.shape[-1] ** -0.5
    y = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=scale)
    return y.transpose(1, 2)[..., : v.shape[-1]]


def attend_near(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    causal: bool,
    offset: int = 0,
    real: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`attend` within a window; 0 = to all keys.

    Args:
        q: (B, L, H, D), whose first one stands where k (B, S, H, D) and v (B, S, H, P) have their `offset`-th.
        window: how far apart tokens that see each other are at most.
        real: bool (B, S), where keys are no padding, which stands at the end; None = there is none.

    Blocks of queries meet the keys around them, so that the cost grows with L times the window.
    """
    batch, length = q.shape[:2]
    if offset == 0 and not 0 < window < k.shape[1] - 1:
        # A causal query does not look at the end.
        mask = None if real is None or causal else real[:, None, None, :]
        return attend(q, k, v, causal=causal, mask=mask, dropout=dropout)
    window = min(window or k.shape[1], k.shape[1])
    block, behind = min(max(window, 16), length), 0 if causal else window
    blocks = -(-length // block)
    edges = (window - offset, blocks * block + offset + behind - k.shape[1])  # below 0 = keys that no query sees

    def around(x: Tensor) -> Tensor:
        """(B, S, ...) -> (B, blocks, window + block + behind, ...)."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + edges)
        return x.unfold(1, window + block + behind, block).movedim(-1, 2)

    real = torch.ones(1, k.shape[1], dtype=torch.bool, device=q.device) if real is None else real
    distance = torch.arange(-window, block + behind, device=q.device) - torch.arange(block, device=q.device)[:, None]
    seen = (distance >= -window) & (distance <= behind)
    # Queries that only fill a block see themselves, as none may see nothing.
    mask = (seen & around(real).unsqueeze(2)) | (distance == 0)
    mask = mask.expand(batch, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    q = F.pad(q, (0, 0, 0, 0, 0, blocks * block - length)).unflatten(1, (blocks, block))
    q, k, v = (part.flatten(0, 1) for part in (q, around(k), around(v)))
    return attend(q, k, v, mask=mask, dropout=dropout).unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length]


def of_each_head(part: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, S, K, channels) for each of the heads of q (B, L, H, D): (B, S, H, channels)."""
    groups = q.shape[2] // part.shape[2]
    return part if groups == 1 else part.repeat_interleave(groups, 2)


def of_one_width(*parts: Tensor) -> list[Tensor]:
    """Fills channels up with zeros to the widest width, which changes neither scores nor the first outputs."""
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]


def attention_by_length(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, dropout: float, window: int = 0
) -> Tensor:
    """The general form for tensors (L, H, channels): one padded attention per class of document lengths."""

    def attended(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        return attend_near(q, k, v, window, causal=causal, real=real, dropout=dropout)

    return by_documents(attended, cu_seqlens, lambda length: (length - 1).bit_length(), q, k, v)


# -- rows that ranks share -----------------------------------------------------------------------------------------


def numbers_received(
    tokens: int, nheads: int, key_width: int, value_width: int, ranks: int, kv_heads: int = 0
) -> tuple[int, int]:
    """Returns how many numbers a rank with a part of `tokens` tokens receives in the forward pass, and as many again in
    the backward pass: where it gets whole rows of its heads (queries, keys, values) and gives back what they attend to;
    and where it gets the keys and values of all tokens, in `kv_heads` heads, 0 = nheads. Of the first the most that any
    rank receives."""
    own = -(-nheads // ranks)
    heads = (ranks - 1) * tokens * own * (2 * key_width + value_width) + tokens * (nheads - own) * value_width
    return heads, (ranks - 1) * tokens * (kv_heads or nheads) * (key_width + value_width)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, context: Context | None, cu_seqlens: Tensor | None, causal: bool, **options: Any
) -> Tensor:
    """`packed_attention`, with its options; with a context of parts, shaped as there.

    Ranks exchange tokens for heads, each with keys and values of its own, or gather all keys and values where they are
    more than heads or less is sent so. It is less by two halves of a head at most where heads share none, so that
    causal work, of which the last rank would have the most, is always shared by heads.
    """
    if context is None:
        return packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, **options)
    length, nheads, width = q.shape[1:]
    options.pop("max_seqlen", None)  # of a part, which may be shorter than what documents have on all ranks
    by_heads, by_keys = numbers_received(length, nheads, width, v.shape[-1], context.size, k.shape[2])
    if nheads < context.size or (by_keys < by_heads and not causal):
        return gathered_attention(q, k, v, context, cu_seqlens, causal, **options)

    def whole(v: Tensor, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, _: slice) -> Tensor:
        return packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, **options)

    return over_heads(whole, context, cu_seqlens, of_each_head(v, q), q, of_each_head(k, q))


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int = 0,
    **options: Any,
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
        if window:
            near = slice(max(start, own.start - window), min(keys.stop, own.stop + window))
            known = (of_each_head(part[:, near], q) for part in (k, v))
            return attend_near(asked, *known, window, causal=causal, offset=own.start - near.start, **options)
        mask = causal_lower_right(asked.shape[1], keys.stop - keys.start) if causal else None
        return attend(asked, *(of_each_head(part[:, keys], q) for part in (k, v)), mask=mask, **options)

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
    y.append(packed_attention(*parts, causal=causal, cu_seqlens=own, window=window, **options))
    if end < last:
        y.append(seen(end, bounds[-1]))
    return torch.cat(y, 1)
