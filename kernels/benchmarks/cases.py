"""What is measured: each case builds inputs once and offers our op and its peers on them, forward and
backward.
"""

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
    else:
        v, vectors = torch.randn(1, seqlen, 12, 64), list(torch.randn(2, 1, seqlen, 1, 64).unbind(0))
        inputs, call = [v, *vectors, -0.1 * torch.rand(1, seqlen, 12)], semiseparable_scan
    cotangent = torch.randn_like(inputs[0])
    return {
        "ours": forward_backward(lambda *t: call(*t, cu_seqlens=bounds), inputs, cotangent),
        "ours, one document": forward_backward(call, inputs, cotangent),
    }


def conv(seqlen: int = 2048, batch: int = 2, d: int = 1792) -> Candidates:
    """Hydra's convolution (width 7, SiLU) against conv1d over channels-first copies."""
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
