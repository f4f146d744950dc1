"""The definition of the semiseparable and quasiseparable scans in float64, with which the fast forms are compared.

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


def semiseparable_step_definition(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    input_scale: Tensor | None = None,
    diagonal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence of `semiseparable_definition`, element by element."""
    v, q, k, log_decay, h, w, d = _in_float64(v, q, k, log_decay, state, input_scale, diagonal)
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    a, w, d = (None if x is None else x.expand(v.shape[:2]) for x in (log_decay, w, d))
    write = torch.einsum("bhn,bhp->bhnp", k, v)
    h = (h if a is None else a[..., None, None].exp() * h) + (write if w is None else w[..., None, None] * write)
    y = torch.einsum("bhn,bhnp->bhp", q, h)
    return (y if d is None else y + d[..., None] * v), h


def quasiseparable_matrix(
    q_forward: Tensor,
    k_forward: Tensor,
    q_backward: Tensor,
    k_backward: Tensor,
    log_decay_forward: Tensor | None,
    log_decay_backward: Tensor | None,
    *,
    heads: int,
    input_scale_forward: Tensor | None = None,
    input_scale_backward: Tensor | None = None,
    diagonal: Tensor | None = None,
    shift: bool = True,
    self_term: str = "sum",
    normalize: str | None = None,
    eps: float = 1e-6,
    gate_offset: int = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """M (batch, heads, seqlen, seqlen) of the bidirectional mixer, from its entries.

    For s < t: M[t, s] = q_f[t'] . k_f[s] exp(sum of log_decay_f over s+1 .. t') w_f[s], with t' = t - 1 if
    `shift` else t. For s > t: M[t, s] = q_b[t'] . k_b[s] exp(sum of log_decay_b over t'+o .. s-1+o) w_b[s],
    with t' = t + 1 if `shift` else t and o = `gate_offset`. The diagonal is `diagonal`, plus without `shift`
    the sum (mean) of both directions' q[t] . k[t] w[t]. Normalised, each row is divided by its sum plus eps.
    """
    given = (q_forward, k_forward, q_backward, k_backward, log_decay_forward, log_decay_backward)
    qf, kf, qb, kb, af, ab = _in_float64(*given)
    batch, seqlen = qf.shape[:2]
    wf, wb, d = _in_float64(input_scale_forward, input_scale_backward, diagonal)
    qf, kf, qb, kb = (_per_head(x, heads) for x in (qf, kf, qb, kb))
    zero = qf.new_zeros(batch, seqlen, heads)
    af, ab, d = (zero if x is None else _per_token(x, zero[..., None]) for x in (af, ab, d))
    wf, wb = (1 + zero if x is None else x for x in (wf, wb))
    offset = 1 if shift else 0
    rows = []
    spans = {t: span for span in _documents(cu_seqlens, seqlen) for t in range(*span)}
    for t in range(seqlen):
        start, end = spans[t]
        left, here, right = zero[:, :t], d[:, t : t + 1], zero[:, t + 1 :]
        read = t - offset
        if read >= start:
            # Entries s = start .. read; the last of the sums is empty.
            sums = af[:, start + 1 : read + 1].flip(1).cumsum(1).flip(1)
            decay = torch.cat([sums, zero[:, :1]], 1).exp()
            entries = (qf[:, read, None] * kf[:, start : read + 1]).sum(-1) * decay * wf[:, start : read + 1]
            left = torch.cat([zero[:, :start], entries[:, : t - start]], 1)
            own = entries[:, t - start :]
        read = t + offset
        if read < end:
            # Entries s = read .. end - 1; the first of the sums is empty.
            sums = ab[:, read + gate_offset : end - 1 + gate_offset].cumsum(1)
            decay = torch.cat([zero[:, :1], sums], 1).exp()
            entries = (qb[:, read, None] * kb[:, read:end]).sum(-1) * decay * wb[:, read:end]
            right = torch.cat([entries[:, 1 - offset :], zero[:, end:]], 1)
            own_backward = entries[:, : 1 - offset]
        if not shift:
            here = here + (own + own_backward) * (0.5 if self_term == "mean" else 1.0)
        rows.append(torch.cat([left, here, right], 1))
    matrix = torch.stack(rows, 1).permute(0, 3, 1, 2)
    return matrix / (matrix.sum(-1, keepdim=True) + eps) if normalize else matrix


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
    combine: str = "add",
    self_term: str = "sum",
    normalize: str | None = None,
    eps: float = 1e-6,
    gate_offset: int = 0,
    initial_state_forward: Tensor | None = None,
    initial_state_backward: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """shift(SS_f(v)) and flip(shift(SS_b(flip(v)))), with real flips and two causal scans, put together.

    What the row sums and halved own terms make of M is taken from M itself.
    """
    spans = _documents(cu_seqlens, v.shape[1])

    def flip(x: Tensor | None) -> Tensor | None:
        if x is None or x.dim() == 1:
            return x
        return torch.cat([x[:, start:end].flip(1) for start, end in spans], 1)

    def moved(y: Tensor) -> Tensor:
        """One token to the right in each document."""
        pieces = []
        for start, end in spans:
            if end > start:
                pieces += [torch.zeros_like(y[:, start : start + 1]), y[:, start : end - 1]]
        return torch.cat(pieces, 1)

    if gate_offset and log_decay_backward is not None and log_decay_backward.dim() == 3:
        gates = flip(moved(flip(log_decay_backward)))
    else:
        gates = log_decay_backward

    def both(v: Tensor) -> tuple[Tensor, Tensor]:
        forward = semiseparable_definition(
            v, q_forward, k_forward, log_decay_forward, input_scale=input_scale_forward,
            initial_state=initial_state_forward, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        backward = semiseparable_definition(
            flip(v), flip(q_backward), flip(k_backward), flip(gates), input_scale=flip(input_scale_backward),
            initial_state=initial_state_backward, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return (moved(forward), flip(moved(backward))) if shift else (forward, flip(backward))

    v, diagonal = _in_float64(v, diagonal)
    if normalize or (self_term == "mean" and not shift):
        matrix = quasiseparable_matrix(
            q_forward, k_forward, q_backward, k_backward, log_decay_forward, log_decay_backward, heads=v.shape[2],
            input_scale_forward=input_scale_forward, input_scale_backward=input_scale_backward, diagonal=diagonal,
            shift=shift, self_term=self_term, normalize=normalize, eps=eps, gate_offset=gate_offset,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        y = torch.einsum("bhts,bshp->bthp", matrix, v)
        if initial_state_forward is None and initial_state_backward is None:
            return y
        # What the initial states alone give.
        return y + sum(both(torch.zeros_like(v)))
    forward, backward = both(v)
    own = 0 if diagonal is None else _per_token(diagonal, v)[..., None] * v
    if combine == "concat":
        return torch.cat([forward + own, backward + own], -1)
    return own + (forward * backward if combine == "mult" else forward + backward)


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
