"""Semiseparable and quasiseparable scans in chunks, in PyTorch, with hand-written backward passes.

Within a chunk the mixer is a small matrix (scores q k^T times decays, lower triangle from the forward direction, upper
triangle from the backward one); between chunks only states of size d_state x headdim travel, one direction each way.
Nothing is flipped and no batch is doubled: the backward direction is the same arithmetic under the mirrored mask, and
Hydra's shift reads row t with q[t - 1] and the decays up to t - 1. The backward pass keeps only the inputs.

Sources: "Transformers are SSMs" (arXiv 2405.21060), section 6, for the chunked form; "Hydra" (arXiv 2407.09941).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from matmix.kernels.context import Context, context_name
from matmix.kernels.documents import shift_left
from matmix.kernels.functions import Form, Operation, in_pytorch, working_dtype
from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.chunked.setup import reduce_like
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide, SideGradients


def move_gates(
    log_decay: Tensor | None, gate_offset: int, cu_seqlens: Tensor | None, context: Context | None = None
) -> Tensor | None:
    """The backward direction's log-decays where each step's gate acts between a token and its left neighbour
    (`gate_offset` 1): one token to the left inside its document, no decay at the last one."""
    if gate_offset == 0 or log_decay is None or log_decay.dim() == 1:
        return log_decay
    return shift_left(log_decay, cu_seqlens, context)


class CausalInputs(NamedTuple):
    """The arguments of matmix::semiseparable_scan; see `semiseparable_scan`."""

    v: Tensor
    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None = None
    diagonal: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    return_final_state: bool = False
    chunk_size: int | None = None
    context: str = ""

    @property
    def call(self) -> ScanCall:
        side = ScanSide(self.q, self.k, self.log_decay, self.input_scale, self.initial_state, False)
        return ScanCall(self.v, (side,), self.diagonal, ScanForm(), self.cu_seqlens, self.chunk_size, self.context)


class CausalOutputs(NamedTuple):
    """The results of matmix::semiseparable_scan."""

    y: Tensor
    final: Tensor | None


def causal_forward(form: Form, given: CausalInputs) -> CausalOutputs:
    output = form.forward(given.call, given.return_final_state)
    return CausalOutputs(output.y, output.finals[0] if given.return_final_state else None)


def causal_backward(form: Form, given: CausalInputs, _: CausalOutputs, cotangents: CausalOutputs) -> tuple:
    dy = torch.zeros_like(given.v) if cotangents.y is None else cotangents.y
    dfinals = (cotangents.final,) if given.return_final_state and cotangents.final is not None else None
    dv, (side,), ddiagonal = form.backward(dy, None, dfinals, given.call)
    return dv, side.q, side.k, side.log_decay, side.input_scale, ddiagonal, side.initial_state


SEMISEPARABLE = Operation(
    "semiseparable_scan", CausalInputs, CausalOutputs, Form(scan_forward, scan_backward),
    forward=causal_forward, backward=causal_backward,
)  # fmt: skip


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
    input_scale_forward: Tensor | None = None
    input_scale_backward: Tensor | None = None
    diagonal: Tensor | None = None
    initial_state_forward: Tensor | None = None
    initial_state_backward: Tensor | None = None
    cu_seqlens: Tensor | None = None
    shift: bool = True
    combine: str = "add"
    self_term: str = "sum"
    normalize: bool = False
    eps: float = 1e-6
    chunk_size: int | None = None
    return_final_states: bool = False
    context: str = ""

    @property
    def call(self) -> ScanCall:
        sides = (
            ScanSide(*(getattr(self, f"{field}_{name}") for field in SideGradients._fields), name == "backward")
            for name in ("forward", "backward")
        )
        form = ScanForm(self.shift, self.combine, self.self_term, self.normalize, self.eps)
        return ScanCall(self.v, tuple(sides), self.diagonal, form, self.cu_seqlens, self.chunk_size, self.context)


class TwoSidedOutputs(NamedTuple):
    """The results of matmix::quasiseparable_scan; see `ScanOutput`."""

    y: Tensor
    row_sum: Tensor | None
    rest: Tensor | None
    final_forward: Tensor | None = None
    final_backward: Tensor | None = None


def two_sided_forward(form: Form, given: TwoSidedInputs) -> TwoSidedOutputs:
    output = form.forward(given.call, given.return_final_states)
    return TwoSidedOutputs(output.y, output.row_sum, output.rest, *(output.finals or (None, None)))


def two_sided_backward(
    form: Form, given: TwoSidedInputs, outputs: TwoSidedOutputs, cotangents: TwoSidedOutputs
) -> tuple:
    """The gradients by a form whose `backward` is that of a linear scan."""
    v, diagonal, call, dy = given.v, given.diagonal, given.call, cotangents.y
    exact = working_dtype(v)
    if dy is None:
        dy = v.new_zeros(*v.shape[:3], v.shape[3] * (2 if given.combine == "concat" else 1))
    dfinals = cotangents.final_forward, cotangents.final_backward
    if not given.return_final_states or all(dfinal is None for dfinal in dfinals):
        dfinals = None
    if given.normalize:
        # y = n / s, so dn = dy / s and ds = -dy . y / s.
        y, row_sum, rest, *_ = outputs
        divided = (dy.to(exact) / (row_sum + given.eps).unsqueeze(-1)).to(v.dtype)
        drow_sum = -(divided.to(exact) * (y if rest is None else y.to(exact) + rest)).sum(-1)
        dv, (first, second), ddiagonal = form.backward(divided, drow_sum, dfinals, call)
    elif given.combine == "mult":
        apart = call._replace(diagonal=None, form=call.form._replace(combine="concat"))
        halves = form.forward(apart, False).y.chunk(2, -1)
        dv, (first, second), ddiagonal = form.backward(
            torch.cat([dy * halves[1], dy * halves[0]], -1), None, dfinals, apart
        )
        if diagonal is not None:
            dv = (dv.to(exact) + diagonal.to(exact).unsqueeze(-1) * dy).to(v.dtype)
            ddiagonal = reduce_like((dy.to(exact) * v).sum(-1), diagonal)
    else:
        dv, (first, second), ddiagonal = form.backward(dy, None, dfinals, call)
    return (
        dv, first.q, first.k, second.q, second.k, first.log_decay, second.log_decay, first.input_scale,
        second.input_scale, ddiagonal, first.initial_state, second.initial_state,
    )  # fmt: skip


QUASISEPARABLE = Operation(
    "quasiseparable_scan", TwoSidedInputs, TwoSidedOutputs, Form(scan_forward, scan_backward),
    without_gradient=("row_sum", "rest"), kept=lambda given: ("y", "row_sum", "rest") if given.normalize else (),
    forward=two_sided_forward, backward=two_sided_backward,
)  # fmt: skip


def semiseparable_chunked(
    *tensors: Tensor | None, context: Context | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`semiseparable_scan` in PyTorch, without argument checks; see there."""
    given = CausalInputs(*tensors, context=context_name(context), **options)
    y, final = in_pytorch(SEMISEPARABLE)(given)
    return (y, final) if given.return_final_state else y


def quasiseparable_chunked(
    *tensors: Tensor | None,
    normalize: str | None = None,
    gate_offset: int = 0,
    context: Context | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`quasiseparable_scan` in PyTorch, without argument checks; see there."""
    given = TwoSidedInputs(*tensors, normalize=normalize is not None, context=context_name(context), **options)
    gates = move_gates(given.log_decay_backward, gate_offset, given.cu_seqlens, context)
    outputs = in_pytorch(QUASISEPARABLE)(given._replace(log_decay_backward=gates))
    return (outputs.y, *outputs[3:]) if given.return_final_states else outputs.y
