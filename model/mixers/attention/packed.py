"""softmax(q k^T) v of packed documents, also where ranks share a row."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v per head and document: q, k (B, L, H, D), v (B, L, H, P) -> (B, L, H, P).

    With cu_seqlens (B == 1) a token attends within its own document only, and not even NaN in another one reaches it.
    In half precision on CUDA that is one variable-length flash kernel; elsewhere documents of similar length (within a
    factor of 2) are padded together, so that at most half of the work is padding.
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
    return attention_by_length(q[0], k[0], v[0], cu_seqlens, causal, dropout).unsqueeze(0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """scaled_dot_product_attention of q (B, L, H, D), k (B, S, H, D), v (B, S, H, P) -> (B, L, H, P).

    Its flash kernels want D = P. With other widths it would fall back on a form that keeps the L x S matrix.
    """
    parts, scale = (part.transpose(1, 2) for part in of_one_width(q, k, v)), q.shape[-1] ** -0.5
    y = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=scale)
    return y.transpose(1, 2)[..., : v.shape[-1]]


def of_one_width(*parts: Tensor) -> list[Tensor]:
    """Fills channels up with zeros to the widest width, which changes neither scores nor the first outputs."""
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]


def attention_by_length(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, dropout: float) -> Tensor:
    """The general form for tensors (L, H, channels): one padded attention per class of document lengths."""

    def attended(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        # Padding stands at the end, where a causal query does not look.
        mask = None if real is None or causal else real[:, None, None, :]
        return attend(q, k, v, causal=causal, mask=mask, dropout=dropout)

    return by_documents(attended, cu_seqlens, lambda length: (length - 1).bit_length(), q, k, v)
