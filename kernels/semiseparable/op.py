"""The semiseparable (SSD, causal) and quasiseparable (Hydra, LION, bidirectional) scans as ops: checks, backend choice,
registration with PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.backend import Forms, check_backend
from matmix.kernels.checks import check_chunk_size
from matmix.kernels.registration import register
from matmix.kernels.semiseparable.chunked.autograd import combined_backward, move_gates
from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.chunked.setup import scan_dtype, scan_flops
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide, check_form, check_scan, no_kernel


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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal scan h_t = exp(log_decay_t) h_{t-1} + input_scale_t k_t v_t^T, y_t = q_t^T h_t + diagonal_t v_t.

    "Transformers are SSMs" (arXiv 2405.21060): with log_decay = dt A and input_scale = dt it is the core of
    the SSD layer; without decays it is linear attention, with constant ones RetNet.

    Args:
        v: values (batch, seqlen, nheads, headdim).
        q: (batch, seqlen, ngroups, d_state), typed like v; nheads a multiple of ngroups, consecutive heads share
            a group.
        k: shaped and typed like q.
        log_decay: (batch, seqlen, nheads), (nheads,) or None for no decay; -inf forgets everything. At most
            LARGEST_LOG_DECAY = 0.01: more is a ValueError on the CPU and taken as 0.01 on accelerators, where
            nobody waits to look (see `matmix.kernels.checks`).
        input_scale: (batch, seqlen, nheads) or None for 1.
        diagonal: (batch, seqlen, nheads), (nheads,) or None for no skip.
        initial_state: (batch, nheads, d_state, headdim), or (documents, ...) with `cu_seqlens`; None for
            zero.
        return_final_state: also return the state after the last token (of each document).
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1). A
            document's output does not depend on its neighbours. A document without tokens passes its state
            through.
        chunk_size: 16, 32, 64, 128 or 256; None lets the backend choose.
        backend: "auto", "torch" or "triton".

    Returns:
        y shaped and typed like v; with `return_final_state` also the states, float32 (float64 for float64
        inputs). Sums and states are float32 throughout whatever the inputs are (float64 for float64).

    Raises:
        ValueError: a shape, dtype, device, bound or option does not fit.
    """
    op = "semiseparable_scan"
    check_scan(
        op, v, {"q": q, "k": k}, {"log_decay": log_decay}, {"input_scale": input_scale}, diagonal, {"initial_state":
        initial_state}, cu_seqlens,
    )  # fmt: skip
    check_chunk_size(op, chunk_size)
    check_backend(op, backend, v, no_kernel(v, q))
    y, final = _semiseparable(
        CausalInputs(
            v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, return_final_state, chunk_size,
            backend,
        )
    )  # fmt: skip
    return (y, final) if return_final_state else y


class CausalInputs(NamedTuple):
    """The arguments of matmix::semiseparable_scan; see `semiseparable_scan`."""

    v: Tensor
    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None
    diagonal: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    final_state: bool
    chunk_size: int | None
    backend: str

    @property
    def call(self) -> ScanCall:
        side = ScanSide(self.q, self.k, self.log_decay, self.input_scale, self.initial_state, False)
        return ScanCall(self.v, (side,), self.diagonal, ScanForm(), self.cu_seqlens, self.chunk_size)


class CausalOutputs(NamedTuple):
    """The results of matmix::semiseparable_scan."""

    y: Tensor
    final: Tensor | None


CAUSAL_FORMS = Forms("semiseparable_scan", "semiseparable.fused.launch", scan_forward, scan_backward)


def _causal_forward(given: CausalInputs) -> CausalOutputs:
    why_not = no_kernel(given.v, given.q)
    run = CAUSAL_FORMS.choose("forward", given.backend, given.v, why_not)
    output = run(given.call, given.final_state)
    return CausalOutputs(output.y, output.final)


def _causal_like(given: CausalInputs) -> CausalOutputs:
    v, bounds = given.v, given.cu_seqlens
    rows = v.shape[0] if bounds is None else bounds.shape[0] - 1
    shape = (rows, v.shape[2], given.q.shape[3], v.shape[3])
    final = v.new_empty(shape, dtype=scan_dtype(v)) if given.final_state else None
    return CausalOutputs(torch.empty_like(v, memory_format=torch.contiguous_format), final)


def _causal_backward(given: CausalInputs, _: CausalOutputs, cotangents: CausalOutputs) -> dict[str, Tensor | None]:
    why_not = no_kernel(given.v, given.q)
    run = CAUSAL_FORMS.choose("backward", given.backend, given.v, why_not)
    dy = torch.zeros_like(given.v) if cotangents.y is None else cotangents.y
    dfinal = cotangents.final if given.final_state else None
    dv, (side,), ddiagonal = run(dy, None, dfinal, given.call)
    return {
        "v": dv, "q": side.q, "k": side.k, "log_decay": side.log_decay, "input_scale": side.input_scale,
        "diagonal": ddiagonal, "initial_state": side.initial_state,
    }  # fmt: skip


def _causal_flops(given: CausalInputs, *, backward: bool) -> int:
    return scan_flops(given.v, given.q, 1, ScanForm(), given.chunk_size, backward=backward)


_semiseparable = register(
    "semiseparable_scan", _causal_forward, _causal_like, CausalInputs, CausalOutputs,
    backward=_causal_backward, flops=_causal_flops,
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
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Bidirectional scan y = shift(SS_f(v)) + flip(shift(SS_b(flip v))) + diagonal v, without any flips.

    "Hydra" (arXiv 2407.09941); with shift=False, self_term="mean", normalize="row_sum" and gate_offset=1 it is
    LION (arXiv 2502.16249), Y = (Q K^T * M) V over its row sums. The backward direction's tensors are indexed
    by position like all others: nothing is flipped by the caller. Both directions may be given the same q or
    k, which is not copied.

    Tensors, packing, chunks, backends and errors are those of `semiseparable_scan`;
    `initial_state_backward` is the state beyond the document's last token.

    Args:
        shift: move each direction's output one token on in its own sense and put zero at the document's first
            (last) token, so that a token meets itself only through `diagonal`; else the scans are taken as
            they are.
        combine: "add"; "mult", SS_f(v) * SS_b(v) + diagonal v; or "concat", [SS_f(v) + diagonal v | SS_b(v) +
            diagonal v], which is 2 * headdim wide.
        self_term: without shift, a token's own terms q_t . k_t count in full in both directions ("sum") or
            half in each ("mean", "add" only).
        normalize: None, or "row_sum" to divide each output by the sum of its row of the mixer, diagonal
            included, plus `eps` ("add" only, without initial states).
        eps: added to the row sums, not negative.
        gate_offset: the backward direction decays between token t and a later token s by log_decay_backward
            at t .. s - 1 (0, a flipped causal scan) or at t + 1 .. s (1, LION: each step's gate acts between
            it and its left neighbour in both directions).

    Returns:
        y typed and (but for "concat") shaped like v.
    """
    op = "quasiseparable_scan"
    vectors = {
        "q_forward": q_forward,
        "k_forward": k_forward,
        "q_backward": q_backward,
        "k_backward": k_backward,
    }
    decays = {"log_decay_forward": log_decay_forward, "log_decay_backward": log_decay_backward}
    scales = {"input_scale_forward": input_scale_forward, "input_scale_backward": input_scale_backward}
    states = {"initial_state_forward": initial_state_forward, "initial_state_backward": initial_state_backward}
    check_form(op, shift, combine, self_term, normalize, eps, gate_offset, states)
    check_scan(op, v, vectors, decays, scales, diagonal, states, cu_seqlens)
    check_chunk_size(op, chunk_size)
    check_backend(op, backend, v, no_kernel(v, q_forward))
    log_decay_backward = move_gates(log_decay_backward, gate_offset, cu_seqlens)
    return _quasiseparable(
        TwoSidedInputs(
            v, *vectors.values(), log_decay_forward, log_decay_backward, *scales.values(), diagonal, *states.values(),
            cu_seqlens, shift, combine, self_term, normalize is not None, float(eps), chunk_size, backend,
        )
    ).y  # fmt: skip


class TwoSidedInputs(NamedTuple):
    """The arguments of matmix::quasiseparable_scan; see `quasiseparable_scan`. Gates of the backward direction have
    been moved to where its scan reads them."""

    v: Tensor
    q_forward: Tensor
    k_forward: Tensor
    q_backward: Tensor
    k_backward: Tensor
    log_decay_forward: Tensor | None
    log_decay_backward: Tensor | None
    input_scale_forward: Tensor | None
    input_scale_backward: Tensor | None
    diagonal: Tensor | None
    initial_state_forward: Tensor | None
    initial_state_backward: Tensor | None
    cu_seqlens: Tensor | None
    shift: bool
    combine: str
    self_term: str
    normalize: bool
    eps: float
    chunk_size: int | None
    backend: str

    @property
    def form(self) -> ScanForm:
        return ScanForm(self.shift, self.combine, self.self_term, self.normalize, self.eps)

    @property
    def call(self) -> ScanCall:
        forward = ScanSide(
            self.q_forward, self.k_forward, self.log_decay_forward, self.input_scale_forward,
            self.initial_state_forward, False,
        )  # fmt: skip
        backward = ScanSide(
            self.q_backward, self.k_backward, self.log_decay_backward, self.input_scale_backward,
            self.initial_state_backward, True,
        )  # fmt: skip
        return ScanCall(self.v, (forward, backward), self.diagonal, self.form, self.cu_seqlens, self.chunk_size)


class TwoSidedOutputs(NamedTuple):
    """The results of matmix::quasiseparable_scan; see `ScanOutput`."""

    y: Tensor
    row_sum: Tensor | None
    rest: Tensor | None


TWO_SIDED_FORMS = Forms("quasiseparable_scan", "semiseparable.fused.launch", scan_forward, scan_backward)


def _two_sided_forward(given: TwoSidedInputs) -> TwoSidedOutputs:
    run = TWO_SIDED_FORMS.choose("forward", given.backend, given.v, no_kernel(given.v, given.q_forward))
    output = run(given.call, False)
    return TwoSidedOutputs(output.y, output.row_sum, output.rest)


def _two_sided_like(given: TwoSidedInputs) -> TwoSidedOutputs:
    v = given.v
    y = v.new_empty(*v.shape[:3], v.shape[3] * (2 if given.combine == "concat" else 1))
    if not given.normalize:
        return TwoSidedOutputs(y, None, None)
    return TwoSidedOutputs(
        y, v.new_empty(v.shape[:3], dtype=scan_dtype(v)), torch.empty_like(y) if v.itemsize < 4 else None
    )


def _two_sided_backward(
    given: TwoSidedInputs, outputs: TwoSidedOutputs, cotangents: TwoSidedOutputs
) -> dict[str, Tensor | None]:
    dy = torch.zeros_like(_two_sided_like(given).y) if cotangents.y is None else cotangents.y
    why_not = no_kernel(given.v, given.q_forward)
    forward, backward = (
        TWO_SIDED_FORMS.choose(half, given.backend, given.v, why_not) for half in ("forward", "backward")
    )
    dv, (first, second), ddiagonal = combined_backward(forward, backward, dy, None, *outputs, given.call)
    gradients = {"v": dv, "diagonal": ddiagonal}
    for name, side in (("forward", first), ("backward", second)):
        gradients |= {f"{field}_{name}": gradient for field, gradient in side._asdict().items()}
    return gradients


def _two_sided_flops(given: TwoSidedInputs, *, backward: bool) -> int:
    return scan_flops(given.v, given.q_forward, 2, given.form, given.chunk_size, backward=backward)


_quasiseparable = register(
    "quasiseparable_scan", _two_sided_forward, _two_sided_like, TwoSidedInputs, TwoSidedOutputs,
    backward=_two_sided_backward, flops=_two_sided_flops,
    without_gradient=("row_sum", "rest"), kept=lambda given: ("y", "row_sum", "rest") if given.normalize else (),
)  # fmt: skip
