"""Our PyTorch forms under torch.compile: both halves of the hand-written pair, each compiled as a whole.

The registered ops are opaque to torch.compile, which is what models want of them; here the functions inside are
compiled instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.form import ScanForm, ScanSide

FORM = ScanForm(shift=True)


def _sides(qf, kf, qb, kb, dt_forward, dt_backward, decay) -> tuple[ScanSide, ScanSide]:
    return (
        ScanSide(qf, kf, dt_forward * decay, dt_forward, None, False),
        ScanSide(qb, kb, dt_backward * decay, dt_backward, None, True),
    )


def _forward(v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal) -> Tensor:
    sides = _sides(qf, kf, qb, kb, dt_forward, dt_backward, decay)
    return scan_forward(v, sides, diagonal, FORM, None, None, False).y


def _backward(dy, v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal) -> tuple[Tensor, ...]:
    sides = _sides(qf, kf, qb, kb, dt_forward, dt_backward, decay)
    dv, (f, b), ddiagonal = scan_backward(dy, None, None, v, sides, diagonal, FORM, None, None)
    steps = [d.input_scale + d.log_decay * decay for d in (f, b)]
    rates = (f.log_decay * dt_forward + b.log_decay * dt_backward).sum((0, 1))
    return dv, f.q, f.k, b.q, b.k, *steps, rates, ddiagonal


def compiled_scan() -> Callable[..., Tensor]:
    """The bidirectional scan on the tensors of `hydra_inputs`."""
    forward = torch.compile(_forward, dynamic=False)
    backward = torch.compile(_backward, dynamic=False)

    class CompiledScan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx, dy):
            return backward(dy, *ctx.saved_tensors)

    return CompiledScan.apply
