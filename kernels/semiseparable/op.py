"""The semiseparable (SSD, causal) and quasiseparable (Hydra, LION, bidirectional) scans as ops: checks, backend choice,
registration with PyTorch."""

import torch
from torch import Tensor

from matmix.kernels.checks import check_chunk_size
from matmix.kernels.context import Context, context_name
from matmix.kernels.functions import working_dtype
from matmix.kernels.registration import register
from matmix.kernels.semiseparable.chunked.autograd import (
    QUASISEPARABLE,
    SEMISEPARABLE,
    CausalInputs,
    CausalOutputs,
    TwoSidedInputs,
    TwoSidedOutputs,
    move_gates,
)
from matmix.kernels.semiseparable.chunked.setup import scan_flops
from matmix.kernels.semiseparable.form import ScanForm, check_form, check_scan, no_kernel


def semiseparable_scan(
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
    chunk_size: int | None = None,
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal scan h_t = exp(log_decay_t) h_{t-1} + input_scale_t k_t v_t^T, y_t = q_t^T h_t + diagonal_t v_t.

    "Transformers are SSMs" (arXiv 2405.21060): with log_decay = dt A and input_scale = dt it is the core of the SSD
    layer; without decays it is linear attention, with constant ones RetNet.

    Args:
        v: values (batch, seqlen, nheads, headdim).
        q: (batch, seqlen, ngroups, d_state), typed like v; nheads a multiple of ngroups, consecutive heads share a
            group.
        k: shaped and typed like q.
        log_decay: (batch, seqlen, nheads), (nheads,) or None for no decay; -inf forgets everything. At most
            LARGEST_LOG_DECAY = 0.01: more is a ValueError on the CPU and taken as 0.01 on accelerators, where nobody
            waits to look (see `matmix.kernels.checks`).
        input_scale: (batch, seqlen, nheads) or None for 1.
        diagonal: (batch, seqlen, nheads), (nheads,) or None for no skip.
        initial_state: (batch, nheads, d_state, headdim), or (documents, ...) with `cu_seqlens`; None for zero.
        return_final_state: also return the state after the last token (of each document).
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1). A document's output
            does not depend on its neighbours. A document without tokens passes its state through.
        chunk_size: 16, 32, 64, 128 or 256; None lets the backend choose.
        context: the ranks that rows are cut over: tensors are this rank's part, and `cu_seqlens` is relative to it (see
            `matmix.kernels.context`). The initial state is taken on the rank with the first token of the row or
            document; others hold what they like, and get no gradient of it. The final state is returned on the rank
            with the last token, and zeros on others. Between the ranks goes a state of each head, whatever the length.
        backend: "auto", "torch" or "triton".

    Returns:
        y shaped and typed like v; with `return_final_state` also the states, float32 (float64 for float64 inputs). Sums
        and states are float32 throughout whatever the inputs are (float64 for float64).

    Raises:
        ValueError: a shape, dtype, device, bound or option does not fit.
    """
    op = "semiseparable_scan"
    given = CausalInputs(
        v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, return_final_state, chunk_size,
        context_name(context),
    )  # fmt: skip
    check_scan(op, given)
    check_chunk_size(op, chunk_size)
    y, final = _semiseparable(given, backend)
    return (y, final) if return_final_state else y


def _causal_like(given: CausalInputs, _: bool) -> CausalOutputs:
    final = _final_like(given, given.q, given.return_final_state)
    return CausalOutputs(torch.empty_like(given.v, memory_format=torch.contiguous_format), final)


def _final_like(given: CausalInputs | TwoSidedInputs, q: Tensor, wanted: bool) -> Tensor | None:
    v, bounds = given.v, given.cu_seqlens
    rows = v.shape[0] if bounds is None else bounds.shape[0] - 1
    shape = (rows, v.shape[2], q.shape[3], v.shape[3] + given.call.form.normalize)
    return v.new_empty(shape, dtype=working_dtype(v)) if wanted else None


_semiseparable = register(
    SEMISEPARABLE, "semiseparable.fused.launch", _causal_like,
    why_not=lambda given: no_kernel(given.q.shape[3], given.v.shape[3]),
    flops=lambda given, backward: scan_flops(given.v, given.q, 1, ScanForm(), given.chunk_size, backward=backward),
)  # fmt: skip


def quasiseparable_scan(
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
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Bidirectional scan y = shift(SS_f(v)) + flip(shift(SS_b(flip v))) + diagonal v, without any flips.

    "Hydra" (arXiv 2407.09941); with shift=False, self_term="mean", normalize="row_sum" and gate_offset=1 it is LION
    (arXiv 2502.16249), Y = (Q K^T * M) V over its row sums. The backward direction's tensors are indexed by position
    like all others: nothing is flipped by the caller. Both directions may be given the same q or k, which is not
    copied.

    Tensors, packing, chunks, parts of rows, backends and errors are those of `semiseparable_scan`;
    `initial_state_backward` is the state beyond the document's last token, and belongs to the rank that has this token.

    Args:
        shift: move each direction's output one token on in its own sense and put zero at the document's first (last)
            token, so that a token meets itself only through `diagonal`; else the scans are taken as they are.
        combine: "add"; "mult", SS_f(v) * SS_b(v) + diagonal v; or "concat", [SS_f(v) + diagonal v | SS_b(v) + diagonal
            v], which is 2 * headdim wide.
        self_term: without shift, a token's own terms q_t . k_t count in full in both directions ("sum") or half in each
            ("mean", "add" only).
        normalize: None, or "row_sum" to divide each output by the sum of its row of the mixer, diagonal included, plus
            `eps` ("add" only). States then have a column more, (documents, nheads, d_state, headdim + 1): what they
            add to the sums of rows, a state of values 1.
        return_final_states: also return the state behind the last token of each document in the forward direction, and
            that before the first token in the backward direction.
        eps: added to the row sums, not negative.
        gate_offset: the backward direction decays between token t and a later token s by log_decay_backward at t .. s -
            1 (0, a flipped causal scan) or at t + 1 .. s (1, LION: each step's gate acts between it and its left
            neighbour in both directions).

    Returns:
        y typed and (but for "concat") shaped like v; with `return_final_states` (y, forward, backward), the states
        shaped like the initial ones, float32 (float64 for float64 inputs).
    """
    op = "quasiseparable_scan"
    given = TwoSidedInputs(
        v, q_forward, k_forward, q_backward, k_backward, log_decay_forward, log_decay_backward, input_scale_forward,
        input_scale_backward, diagonal, initial_state_forward, initial_state_backward, cu_seqlens, shift, combine,
        self_term, normalize is not None, eps, chunk_size, return_final_states, context_name(context),
    )  # fmt: skip
    check_form(op, given, normalize, gate_offset)
    check_scan(op, given)
    check_chunk_size(op, chunk_size)
    gates = move_gates(log_decay_backward, gate_offset, cu_seqlens, context)
    y, _, _, *finals = _quasiseparable(given._replace(log_decay_backward=gates, eps=float(eps)), backend)
    return (y, *finals) if return_final_states else y


def _two_sided_like(given: TwoSidedInputs, _: bool) -> TwoSidedOutputs:
    v = given.v
    y = v.new_empty(*v.shape[:3], v.shape[3] * (2 if given.combine == "concat" else 1))
    row_sum = rest = None
    if given.normalize:
        row_sum = v.new_empty(v.shape[:3], dtype=working_dtype(v))
        rest = torch.empty_like(y) if v.itemsize < 4 else None
    finals = _final_like(given, given.q_forward, given.return_final_states)
    return TwoSidedOutputs(y, row_sum, rest, finals, None if finals is None else torch.empty_like(finals))


def _two_sided_flops(given: TwoSidedInputs, *, backward: bool) -> int:
    return scan_flops(given.v, given.q_forward, 2, given.call.form, given.chunk_size, backward=backward)


_quasiseparable = register(
    QUASISEPARABLE, "semiseparable.fused.launch", _two_sided_like, flops=_two_sided_flops,
    why_not=lambda given: no_kernel(given.q_forward.shape[3], given.v.shape[3]),
)  # fmt: skip
