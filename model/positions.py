"""Positions of tokens in their documents, conversion of padded batches to packed ones and back, one row for each
document, and rotary positions."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.context import Context


def document_positions(
    length: int, cu_seqlens: Tensor | None, device: torch.device, context: Context | None = None
) -> Tensor:
    """Position of each of `length` tokens within its document: (length,) int64, counting from 0.

    `cu_seqlens` (ndocs + 1,) int32 holds the document boundaries, of a part also those of documents that began before
    it (below 0) or go on behind it; None means one document, over all ranks of a context.
    """
    positions = torch.arange(length, device=device)
    if cu_seqlens is None:
        return positions if context is None else positions + context.rank * length
    boundaries = cu_seqlens.long()
    starts, lengths = boundaries[:-1], boundaries.clamp(0, length).diff()
    return positions - torch.repeat_interleave(starts, lengths, output_size=length)


def mirrored_places(length: int, cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """Where the token stands that is as far from its document's end as each one is from its beginning: (length,) int64.
    cu_seqlens: (ndocs + 1,), from 0 to length."""
    boundaries = cu_seqlens.long()
    sums = torch.repeat_interleave(boundaries[:-1] + boundaries[1:] - 1, boundaries.diff(), output_size=length)
    return sums - torch.arange(length, device=device)


def unpad_indices(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Describes a padded batch without its padding.

    Args: attention_mask (B, L), nonzero where a token is real.
    Returns: indices (n,) int64 of the real tokens in the flattened batch; cu_seqlens (rows with tokens + 1,)
        int32; the length of the longest row.
    """
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1, dtype=torch.int32)
    lengths = lengths[lengths > 0]
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=mask.device)
    cu_seqlens[1:] = lengths.cumsum(0, dtype=torch.int32)
    longest = int(lengths.max()) if lengths.numel() else 0
    return mask.flatten().nonzero().squeeze(1), cu_seqlens, longest


def in_one_row(inputs: Tensor, indices: Tensor | None) -> Tensor:
    """(B, L, ...) -> (1, n, ...): the flattened batch, or only its positions `indices` (n,)."""
    flat = inputs.flatten(0, 1)
    return (flat if indices is None else flat[indices]).unsqueeze(0)


def similar_documents(cu_seqlens: Tensor, bound: Callable[[int], int]) -> list[tuple[Tensor, Tensor]]:
    """All documents that have tokens, those of one bound(length) together, to be filled up to rows of one length:
    int64 (documents, longest), the place of each position in the packed row, beyond it for padding; and bool
    (documents, longest), whether it is no padding. On the host, where cu_seqlens is read."""
    boundaries = cu_seqlens.tolist()
    spans: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(boundaries):
        if start < end:
            spans.setdefault(bound(end - start), []).append((start, end - start))
    groups = []
    for members in spans.values():
        starts, lengths = torch.tensor(members).T.unsqueeze(-1)
        positions = torch.arange(int(lengths.max()))
        real = positions < lengths
        groups.append((torch.where(real, starts + positions, boundaries[-1]), real))
    return groups


def by_documents(run: Callable[..., Tensor], cu_seqlens: Tensor, bound: Callable[[int], int], *parts: Tensor) -> Tensor:
    """Runs packed documents by themselves, similar ones together: parts (n, ...) -> what `run` makes of them (n, ...).

    run(*rows, real): rows (documents, longest, ...) of each part, zero in padding behind the documents, and
    bool (documents, longest), where they are real, or None where there is no padding -> (documents, longest, ...).
    bound: see `similar_documents`. No number of another document is read, not even NaN.
    """
    outputs, order = [], []
    for places, real in similar_documents(cu_seqlens, bound):
        whole = bool(real.all())
        index = places.flatten().to(parts[0].device)
        filled = parts if whole else (torch.cat((part, part.new_zeros(1, *part.shape[1:]))) for part in parts)
        rows = (part.index_select(0, index).unflatten(0, places.shape) for part in filled)
        y = run(*rows, None if whole else real.to(index.device)).flatten(0, 1)
        outputs.append(y if whole else y.index_select(0, real.flatten().nonzero().squeeze(1).to(y.device)))
        order.append(places[real])
    if not outputs:
        return parts[-1][:0]
    return torch.cat(outputs).index_select(0, torch.cat(order).argsort().to(parts[0].device))


def first_of_documents(x: Tensor, lengths: Tensor) -> Tensor:
    """x (n, C), documents of `lengths` (ndocs,) -> the first row of each, (ndocs, C); zero for empty ones."""
    starts = (lengths.cumsum(0) - lengths).clamp(max=max(x.shape[0] - 1, 0))
    return x[starts] * (lengths > 0).unsqueeze(1)


def mean_of_documents(x: Tensor, lengths: Tensor) -> Tensor:
    """x (n, C), documents of `lengths` (ndocs,) one after the other -> the mean of each, (ndocs, C); zero for empty
    ones. Added in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = torch.arange(x.shape[0], device=x.device)
    # A bag for each document: deterministic on GPUs, too, where index_add is not.
    return F.embedding_bag(rows, wide, lengths.cumsum(0) - lengths, mode="mean").to(x.dtype)


def apply_rotary(q: Tensor, k: Tensor, positions: Tensor, base: float, kind: str) -> tuple[Tensor, Tensor]:
    """Turn neighbouring channel pairs of q and k (B, L, H, D) by positions (L,), in float32 at least.

    kind "rope": pair d turns by base^(-2d/D) per position (arXiv 2104.09864). kind "xpos": the form of mru-lm, after
    arXiv 2212.10554: angles base^(-2(d+1)/D) / 512 per position, queries times zeta_d^(p/512) and keys divided by it.
    Both depend only on differences of positions.
    """
    width, steps, log_scale = q.shape[-1], positions.float()[:, None, None], None
    pairs = torch.arange(width // 2, dtype=torch.float32, device=positions.device)
    if kind == "xpos":
        pairs, steps = pairs + 1, steps / 512
        log_scale = steps * ((4 * pairs / width + 0.4 * width) / (1 + 0.4 * width)).log()
    angles = steps * base ** (-2 * pairs / width)
    cos, sin = angles.cos(), angles.sin()

    def turn(x: Tensor, sign: int) -> Tensor:
        even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        if log_scale is not None:
            turned = turned * (sign * log_scale).exp().unsqueeze(-1)
        return turned.flatten(-2).to(x.dtype)

    return turn(q, 1), turn(k, -1)
