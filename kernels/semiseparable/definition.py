"""The definition of the semiseparable and quasiseparable scans in float64, with which the fast forms are compared.

"Transformers are SSMs" (arXiv 2405.21060) for the causal scan; "Hydra" (arXiv 2407.09941) for the other.
Shapes, names and meaning of the arguments are those of `matmix.kernels.semiseparable_scan` and
`quasiseparable_scan`. Everything here is plain differentiable PyTorch, slow and quadratic in the length.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from matmix.kernels.semiseparable.chunked.autograd import CausalInputs, TwoSidedInputs
from matmix.kernels.semiseparable.chunked.forward import ScanStepInputs


def semiseparable_definition(*tensors: Tensor | None, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence h_t = exp(log_decay_t) h_{t-1} + input_scale_t k_t v_t^T, y_t = q_t^T h_t + diagonal_t v_t."""
    given = _in_float64(CausalInputs(*tensors, **options))
    v, heads = given.v, given.v.shape[2]
    q, k = _per_head(given.q, heads), _per_head(given.k, heads)
    a, w, d = (_per_token(x, v) for x in (given.log_decay, given.input_scale, given.diagonal))
    outputs, finals = [], []
    for number, (start, end) in enumerate(_documents(given.cu_seqlens, v.shape[1])):
        h = torch.zeros(v.shape[0], heads, q.shape[3], v.shape[3], dtype=v.dtype, device=v.device)
        if given.initial_state is not None:
            h = given.initial_state if given.cu_seqlens is None else given.initial_state[number : number + 1]
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
    return (y, torch.cat(finals)) if given.return_final_state else y


def semiseparable_step_definition(*tensors: Tensor | None, **options: Tensor | None) -> tuple[Tensor, Tensor]:
    """One step of the recurrence of `semiseparable_definition`, element by element."""
    v, q, k, log_decay, h, w, d = _in_float64(ScanStepInputs(*tensors, **options))
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    a, w, d = (None if x is None else x.expand(v.shape[:2]) for x in (log_decay, w, d))
    write = torch.einsum("bhn,bhp->bhnp", k, v)
    h = (h if a is None else a[..., None, None].exp() * h) + (write if w is None else w[..., None, None] * write)
    y = torch.einsum("bhn,bhnp->bhp", q, h)
    return (y if d is None else y + d[..., None] * v), h


def quasiseparable_matrix(
    *tensors: Tensor | None, normalize: str | None = None, gate_offset: int = 0, **options: Any
) -> Tensor:
    """M (batch, heads, seqlen, seqlen) of the bidirectional mixer, from its entries.

    For s < t: M[t, s] = q_f[t'] . k_f[s] exp(sum of log_decay_f over s+1 .. t') w_f[s], with t' = t - 1 if
    `shift` else t. For s > t: M[t, s] = q_b[t'] . k_b[s] exp(sum of log_decay_b over t'+o .. s-1+o) w_b[s],
    with t' = t + 1 if `shift` else t and o = `gate_offset`. The diagonal is `diagonal`, plus without `shift`
    the sum (mean) of both directions' q[t] . k[t] w[t]. Normalised, each row is divided by its sum plus eps.
    """
    given = _in_float64(TwoSidedInputs(*tensors, normalize=normalize is not None, **options))
    batch, seqlen, heads, _ = given.v.shape
    vectors = (given.q_forward, given.k_forward, given.q_backward, given.k_backward)
    qf, kf, qb, kb = (_per_head(x, heads) for x in vectors)
    zero = qf.new_zeros(batch, seqlen, heads)
    factors = (given.log_decay_forward, given.log_decay_backward, given.diagonal)
    af, ab, d = (zero if x is None else _per_token(x, zero[..., None]) for x in factors)
    wf, wb = (1 + zero if x is None else x for x in (given.input_scale_forward, given.input_scale_backward))
    offset = 1 if given.shift else 0
    rows = []
    spans = {t: span for span in _documents(given.cu_seqlens, seqlen) for t in range(*span)}
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
        if not given.shift:
            here = here + (own + own_backward) * (0.5 if given.self_term == "mean" else 1.0)
        rows.append(torch.cat([left, here, right], 1))
    matrix = torch.stack(rows, 1).permute(0, 3, 1, 2)
    return matrix / (matrix.sum(-1, keepdim=True) + given.eps) if given.normalize else matrix


def quasiseparable_definition(
    *tensors: Tensor | None, normalize: str | None = None, gate_offset: int = 0, **options: Any
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """shift(SS_f(v)) and flip(shift(SS_b(flip(v)))), with real flips and two causal scans, put together.

    The row sums are what becomes of values of 1. What halved own terms make of M is taken from M itself.
    """
    given = _in_float64(TwoSidedInputs(*tensors, **options))
    v, cu_seqlens, gates = given.v, given.cu_seqlens, given.log_decay_backward
    if normalize:
        with_ones = given._replace(v=torch.cat([v, torch.ones_like(v[..., :1])], -1), return_final_states=True)
        sums, *finals = quasiseparable_definition(gate_offset=gate_offset, **with_ones._asdict())
        y = sums[..., :-1] / (sums[..., -1:] + given.eps)
        return (y, *finals) if given.return_final_states else y
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

    if gate_offset and gates is not None and gates.dim() == 3:
        gates = flip(moved(flip(gates)))

    def both(v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        forward, final = semiseparable_definition(
            v, given.q_forward, given.k_forward, given.log_decay_forward, given.input_scale_forward, None,
            given.initial_state_forward, cu_seqlens, True,
        )  # fmt: skip
        backward, other = semiseparable_definition(
            flip(v), flip(given.q_backward), flip(given.k_backward), flip(gates), flip(given.input_scale_backward),
            None, given.initial_state_backward, cu_seqlens, True,
        )  # fmt: skip
        forward, backward = (moved(forward), moved(backward)) if given.shift else (forward, backward)
        return forward, flip(backward), final, other

    forward, backward, *finals = both(v)
    own = 0 if given.diagonal is None else _per_token(given.diagonal, v)[..., None] * v
    if given.self_term == "mean" and not given.shift:
        matrix = quasiseparable_matrix(gate_offset=gate_offset, **given._replace(normalize=None)._asdict())
        # What the initial states alone give.
        y = torch.einsum("bhts,bshp->bthp", matrix, v) + sum(both(torch.zeros_like(v))[:2])
    elif given.combine == "concat":
        y = torch.cat([forward + own, backward + own], -1)
    else:
        y = own + (forward * backward if given.combine == "mult" else forward + backward)
    return (y, *finals) if given.return_final_states else y


def _in_float64(given: Any) -> Any:
    """The same arguments with all numbers in float64."""
    floating = (isinstance(x, Tensor) and x.is_floating_point() for x in given)
    return type(given)(*(x.to(torch.float64) if wide else x for x, wide in zip(given, floating, strict=True)))


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _per_token(x: Tensor | None, like: Tensor) -> Tensor | None:
    return x.expand(like.shape[:3]) if x is not None and x.dim() == 1 else x


def _documents(cu_seqlens: Tensor | None, seqlen: int) -> list[tuple[int, int]]:
    if cu_seqlens is None:
        return [(0, seqlen)]
    bounds = cu_seqlens.tolist()
    return list(itertools.pairwise(bounds))
