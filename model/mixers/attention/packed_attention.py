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
        return attend(q, k, v, causal=causal, dropout=dropout)
    width = max(q.shape[-1], v.shape[-1])
    flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if flash and varlen_attn is not None and dropout == 0.0 and width % 8 == 0 and width <= 256:
        longest = max_seqlen or int(cu_seqlens.diff().max())
        window = (-1, 0) if causal else (-1, -1)
        parts = (part[0] for part in of_one_width(q, k, v))
        scale = q.shape[-1] ** -0.5
        y = varlen_attn(*parts, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=window)
        return y[..., : v.shape[-1]].unsqueeze(0)
    return attention_by_length(q[0], k[0], v[0], cu_seqlens.tolist(), causal, dropout).unsqueeze(0)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """scaled_dot_product_attention of q (B, L, H, D), k (B, S, H, D), v (B, S, H, P) -> (B, L, H, P).

    Its flash kernels want D = P. With other widths it would fall back on a form that keeps the L x S matrix.
    """
    y = F.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in of_one_width(q, k, v)),
        attn_mask=mask,
        is_causal=causal,
        dropout_p=dropout,
        scale=q.shape[-1] ** -0.5,
    )
    return y.transpose(1, 2)[..., : v.shape[-1]]


def of_one_width(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Fills the channels of each part up with zeros to the widest width, which changes neither the scores nor the first
    channels of the result."""
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]


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
        y = attend(q[index], k[index], v[index], causal=causal, mask=mask, dropout=dropout)
        outputs.append(y[real])
        places.append(index[real])
    if not outputs:
        return v[:0]
    order = torch.cat(places).argsort()
    return torch.cat(outputs)[order]
