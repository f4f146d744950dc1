"""Semiseparable and quasiseparable scans by their definition, in float64: what the fast forms must compute.

"Transformers are SSMs" (arXiv 2405.21060) for the causal scan; "Hydra" (arXiv 2407.09941) for the other.
Shapes, names and meaning of the arguments are those of `matmix.kernels.semiseparable_scan` and
`quasiseparable_scan`. Everything here is plain differentiable PyTorch, slow and quadratic in the length.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def semiseparable_definition(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    *,
    input_scale: Tensor | None = None,
    diagonal: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence h_t = exp(log_decay_t) h_{t-1} + input_scale_t k_t v_t^T, y_t = q_t^T h_t + diagonal_t
    v_t.
    """
    v, q, k, log_decay, input_scale, diagonal, initial_state = _in_float64(
        v, q, k, log_decay, input_scale, diagonal, initial_state
    )
    heads, seqlen = v.shape[2], v.shape[1]
    q, k = _per_head(q, heads), _per_head(k, heads)
    a, w, d = (_per_token(x, v) for x in (log_decay, input_scale, diagonal))
    outputs, finals = [], []
    for number, (start, end) in enumerate(_documents(cu_seqlens, seqlen)):
        h = torch.zeros(v.shape[0], heads, q.shape[3], v.shape[3], dtype=v.dtype, device=v.device)
        if initial_state is not None:
            h = initial_state if cu_seqlens is None else initial_state[number : number + 1]
        for t in range(start, end):
            write = k[:, t, :, :, None] * v[:, t, :, None, :]
            if w is not None:
                write = w[:, t, :, None, None] * write
            if a is not None:
                h = a[:, t, :, None, None].exp() * h
            h = h + write
            outputs.append((q[:, t, :, None, :] @ h).squeeze(-2))
        finals.append(h)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    if d is not None:
        y = y + d[..., None] * v
    return (y, torch.cat(finals)) if return_final_state else y


def quasiseparable_matrix(
    q_forward: Tensor,
    k_forward: Tensor,
    q_backward: Tensor,
    k_backward: Tensor,
    log_decay_forward: Tensor,
    log_decay_backward: Tensor,
    *,
    input_scale_forward: Tensor | None = None,
    input_scale_backward: Tensor | None = None,
    diagonal: Tensor | None = None,
    shift: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """M (batch, nheads, seqlen, seqlen) of the bidirectional mixer, entry by entry. Decays are (batch,
    seqlen, nheads).

    For s < t: M[t, s] = q_f[t'] . k_f[s] exp(sum of log_decay_f over s+1 .. t') w_f[s], with t' = t - 1 if
    `shift` else t; mirrored for s > t; the diagonal is `diagonal` (plus both directions' own terms without
    `shift`).
    """
    given = (q_forward, k_forward, q_backward, k_backward, log_decay_forward, log_decay_backward)
    qf, kf, qb, kb, af, ab = _in_float64(*given)
    batch, seqlen, heads = af.shape
    wf, wb, d = _in_float64(input_scale_forward, input_scale_backward, diagonal)
    qf, kf, qb, kb = (_per_head(x, heads) for x in (qf, kf, qb, kb))
    like = af[..., None]
    wf, wb, d = _per_token(wf, like), _per_token(wb, like), _per_token(d, like)
    offset = 1 if shift else 0
    rows = []
    zero = torch.zeros(batch, heads, dtype=af.dtype, device=af.device)
    spans = {t: span for span in _documents(cu_seqlens, seqlen) for t in range(*span)}
    for t in range(seqlen):
        start, end = spans[t]
        row = [zero] * seqlen
        for s in range(start, t + 1 - offset):
            entry = (qf[:, t - offset] * kf[:, s]).sum(-1) * af[:, s + 1 : t + 1 - offset].sum(1).exp()
            row[s] = row[s] + (entry if wf is None else entry * wf[:, s])
        for s in range(t + offset, end):
            entry = (qb[:, t + offset] * kb[:, s]).sum(-1) * ab[:, t + offset : s].sum(1).exp()
            row[s] = row[s] + (entry if wb is None else entry * wb[:, s])
        if d is not None:
            row[t] = row[t] + d[:, t]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def quasiseparable_definition(
    v: Tensor,
    q_forward: Tensor,
    k_forward: Tensor,
    q_backward: Tensor,
    k_backward: Tensor,
    log_decay_forward: Tensor | None,
    log_decay_backward: Tensor | None,
    *,
    input_scale_forward: Tensor | None = None,
    input_scale_backward: Tensor | None = None,
    diagonal: Tensor | None = None,
    shift: bool = True,
    initial_state_forward: Tensor | None = None,
    initial_state_backward: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """y = shift(SS_f(v)) + flip(shift(SS_b(flip(v)))) + diagonal v, with real flips and two causal scans."""
    spans = _documents(cu_seqlens, v.shape[1])

    def flip(x: Tensor | None) -> Tensor | None:
        if x is None or x.dim() == 1:
            return x
        return torch.cat([x[:, start:end].flip(1) for start, end in spans], 1)

    def moved(y: Tensor) -> Tensor:
        if not shift:
            return y
        pieces = []
        for start, end in spans:
            if end > start:
                pieces += [torch.zeros_like(y[:, start : start + 1]), y[:, start : end - 1]]
        return torch.cat(pieces, 1)

    forward = semiseparable_definition(
        v,
        q_forward,
        k_forward,
        log_decay_forward,
        input_scale=input_scale_forward,
        initial_state=initial_state_forward,
        cu_seqlens=cu_seqlens,
    )
    backward = semiseparable_definition(
        flip(v),
        flip(q_backward),
        flip(k_backward),
        flip(log_decay_backward),
        input_scale=flip(input_scale_backward),
        initial_state=initial_state_backward,
        cu_seqlens=cu_seqlens,
    )
    y = moved(forward) + flip(moved(backward))
    if diagonal is not None:
        v, diagonal = _in_float64(v, diagonal)
        y = y + _per_token(diagonal, v)[..., None] * v
    return y


def _in_float64(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.to(torch.float64) for x in tensors)


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _per_token(x: Tensor | None, like: Tensor) -> Tensor | None:
    return x.expand(like.shape[:3]) if x is not None and x.dim() == 1 else x


def _documents(cu_seqlens: Tensor | None, seqlen: int) -> list[tuple[int, int]]:
    if cu_seqlens is None:
        return [(0, seqlen)]
    bounds = cu_seqlens.tolist()
    return list(itertools.pairwise(bounds))
