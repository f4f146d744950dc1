"""What is measured: each case builds inputs once and offers our op and its peers on them, both passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matmix.kernels import (
    gated_norm,
    matrix_product_scan,
    quasiseparable_scan,
    semiseparable_scan,
    short_conv,
)
from matmix.launch.lab.benchmarks.kernels.flipped import flipped, our_causal, plain_causal
from matmix.launch.lab.benchmarks.kernels.peers import BrentKungProduct, recurrent_quasiseparable

Candidates = dict[str, Callable[[], object]]


def forward_backward(op: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor) -> Callable[[], object]:
    """A call that runs `op` on the inputs and takes the gradients of all of them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(op(*leaves), leaves, cotangent)


def boundaries(seqlen: int, mean: int) -> Tensor:
    """cu_seqlens of documents of random lengths around `mean` that fill a row."""
    draw = torch.Generator().manual_seed(0)
    cuts = torch.randperm(seqlen - 1, generator=draw)[: seqlen // mean - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])]).to(torch.int32)


def quasiseparable(seqlen: int = 2048, batch: int = 4, heads: int = 12, width: int = 64) -> Candidates:
    """Hydra's mixer at d_state 64 against what is published, reversed copies in a causal scan (ours, and the paper's
    left to autograd), its two recurrences in PyTorch, and attention of the same shape.
    """
    v, cotangent = torch.randn(2, batch, seqlen, heads, width).unbind(0)
    vectors = list(torch.randn(4, batch, seqlen, 1, width).unbind(0))
    scales = list(torch.rand(2, batch, seqlen, heads).mul_(0.1).unbind(0))
    decays = [-scale for scale in scales]
    inputs = [v, *vectors, *decays, *scales, torch.randn(batch, seqlen, heads)]

    def ours(v, qf, kf, qb, kb, af, ab, wf, wb, d):
        return quasiseparable_scan(
            v, qf, kf, qb, kb, af, ab, input_scale_forward=wf, input_scale_backward=wb, diagonal=d
        )

    def attention(v):
        y = v.transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y).transpose(1, 2)

    # The same numbers as the causal layer takes them: log-decays are step sizes times a rate per head, here -1.
    steps = [v, *vectors, *scales, -torch.ones(heads), inputs[-1]]
    return {
        "ours": forward_backward(ours, inputs, cotangent),
        "flipped, our causal": forward_backward(flipped(our_causal), steps, cotangent),
        "flipped, plain SSD": forward_backward(flipped(plain_causal), steps, cotangent),
        "attention (SDPA)": forward_backward(attention, [v], cotangent),
        "recurrence": forward_backward(recurrent_quasiseparable, inputs, cotangent),
    }


def matrix_product(order: int, seqlen: int = 1024, batch: int = 8, heads: int = 6) -> Candidates:
    """The MRU's scan against Brent and Kung's, each on the layout that suits it."""
    x = torch.linalg.qr(torch.randn(batch, seqlen, heads, order, order))[0].contiguous()
    cotangent = torch.randn_like(x)
    by_head = [y.transpose(1, 2).contiguous() for y in (x, cotangent)]
    return {
        "ours": forward_backward(matrix_product_scan, [x], cotangent),
        "Brent-Kung": forward_backward(BrentKungProduct.apply, by_head[:1], by_head[1]),
    }


def packed(op: str, seqlen: int = 8192, mean: int = 150) -> Candidates:
    """Many short documents in one row against one row without boundaries: packing should cost nothing."""
    bounds = boundaries(seqlen, mean)
    if op == "matrix product":
        x = torch.linalg.qr(torch.randn(1, seqlen, 6, 8, 8))[0].contiguous()
        inputs, call = [x], matrix_product_scan
    elif op == "short conv":
        inputs, call = [torch.randn(1, seqlen, 896), torch.randn(896, 7)], short_conv
    else:
        v, vectors = torch.randn(1, seqlen, 12, 64), list(torch.randn(2, 1, seqlen, 1, 64).unbind(0))
        inputs, call = [v, *vectors, -0.1 * torch.rand(1, seqlen, 12)], semiseparable_scan
    cotangent = torch.randn_like(inputs[0])
    return {
        "ours": forward_backward(lambda *t: call(*t, cu_seqlens=bounds), inputs, cotangent),
        "ours, one document": forward_backward(call, inputs, cotangent),
    }


def conv(seqlen: int = 2048, batch: int = 2, d: int = 1792) -> Candidates:
    """Hydra's convolution (width 7, SiLU) against conv1d over channels-first views."""
    x, cotangent = torch.randn(2, batch, seqlen, d).unbind(0)
    weight, bias = torch.randn(d, 7), torch.randn(d)

    def plain(x, weight, bias):
        y = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=d)
        return torch.nn.functional.silu(y).transpose(1, 2)

    return {
        "ours": forward_backward(lambda *t: short_conv(*t, activation="silu"), [x, weight, bias], cotangent),
        "conv1d + silu": forward_backward(plain, [x, weight, bias], cotangent),
    }


def norm(rows: int = 8192, d: int = 1536) -> Candidates:
    """Gated RMSNorm against the same line of PyTorch under autograd."""
    x, gate, cotangent = torch.randn(3, rows, d).unbind(0)
    weight = torch.randn(d)

    def plain(x, weight, gate):
        return torch.nn.functional.rms_norm(x, (d,), weight, 1e-5) * torch.nn.functional.silu(gate)

    return {
        "ours": forward_backward(gated_norm, [x, weight, gate], cotangent),
        "rms_norm * silu": forward_backward(plain, [x, weight, gate], cotangent),
    }


CPU_CASES: dict[str, Callable[[], Candidates]] = {
    "quasiseparable, B 4, L 2048, 12 heads of 64, d_state 64": quasiseparable,
    "matrix product, B 8, L 1024, 6 heads, o 4": lambda: matrix_product(4),
    "matrix product, B 8, L 1024, 6 heads, o 8": lambda: matrix_product(8),
    "matrix product, B 8, L 1024, 6 heads, o 16": lambda: matrix_product(16),
    "short conv, B 2, L 2048, d 1792, width 7": conv,
    "gated norm, 8192 rows of 1536": norm,
    "packed semiseparable, L 8192, documents of about 150": lambda: packed("semiseparable"),
    "packed matrix product, L 8192, documents of about 150": lambda: packed("matrix product"),
    "packed short conv, L 8192, documents of about 150": lambda: packed("short conv"),
}
"""Title -> its candidates; the first one, "ours", is what the others are divided by."""
