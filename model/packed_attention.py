"""Attention within the documents of a packed sequence."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch; the general form below serves every device
    varlen_attn = None


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v per head and document: q, k (B, L, H, D), v (B, L, H, P) -> (B, L, H, P).

    With cu_seqlens (B == 1) a token attends within its own document only, and not even NaN in another
    document reaches it. In half precision on CUDA that is one variable-length flash kernel; elsewhere
    documents of similar length (within a factor of 2) are padded together, so that at most half of the work
    is padding.
    """
    if cu_seqlens is None:
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, dropout_p=dropout
        )
        return y.transpose(1, 2)
    flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] == v.shape[-1]
    if flash and varlen_attn is not None and dropout == 0.0 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        longest = max_seqlen or int(cu_seqlens.diff().max())
        window = (-1, 0) if causal else (-1, -1)
        y = varlen_attn(q[0], k[0], v[0], cu_seqlens, cu_seqlens, longest, longest, window_size=window)
        return y.unsqueeze(0)
    return attention_by_length(q[0], k[0], v[0], cu_seqlens.tolist(), causal, dropout).unsqueeze(0)


def attention_by_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: list[int], causal: bool, dropout: float
) -> torch.Tensor:
    """The general form for tensors (L, H, channels): one padded attention per class of document lengths."""
    documents: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(boundaries):
        if end > start:
            documents.setdefault((end - start - 1).bit_length(), []).append((start, end - start))
    device = q.device
    # Padding reads a row of zeros: a real row of another document could hold NaN, which no mask would stop.
    q, k, v = (torch.cat((part, part.new_zeros(1, *part.shape[1:]))) for part in (q, k, v))
    outputs, places = [], []
    for group in documents.values():
        starts, lengths = (torch.tensor(column, device=device) for column in zip(*group, strict=True))
        longest = max(length for _, length in group)
        offsets = torch.arange(longest, device=device)
        real = offsets < lengths.unsqueeze(1)
        index = torch.where(real, starts.unsqueeze(1) + offsets, q.shape[0] - 1)
        padded = any(length < longest for _, length in group)
        # Padding stands at the end, where a causal query does not look.
        mask = real[:, None, None, :] if padded and not causal else None
        y = F.scaled_dot_product_attention(
            q[index].transpose(1, 2),
            k[index].transpose(1, 2),
            v[index].transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            dropout_p=dropout,
        ).transpose(1, 2)
        outputs.append(y[real])
        places.append(index[real])
    if not outputs:
        return v[:0]
    order = torch.cat(places).argsort()
    return torch.cat(outputs)[order]
