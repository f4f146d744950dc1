"""The definition of LION's mixing in float64, with which the fast forms are compared."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.lion.chunked import FEATURE_MAPS, LionInputs
from matmix.kernels.semiseparable.definition import quasiseparable_definition


def lion_mixer_definition(
    *tensors: Tensor | None, return_row_sums: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """See `lion_mixer`; documents one after the other."""
    given = LionInputs(*tensors, **options)
    qkv, gates, nheads, feature_map, gate_offset, forward_gate_offset, eps, cu_seqlens, *_ = given
    qkv = qkv.to(torch.float64)
    bounds = [0, qkv.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, sums = [], []
    for start, end in itertools.pairwise(bounds):
        if start == end:
            continue
        q, k, v = qkv[:, start:end].unflatten(-1, (3, nheads, -1)).unbind(-3)
        q, k = FEATURE_MAPS[feature_map](q) * q.shape[-1] ** -0.5, FEATURE_MAPS[feature_map](k)
        forward = backward = None
        if gates is not None:
            forward = F.logsigmoid(gates.double() if gates.dim() == 1 else gates[:, start:end].double())
            forward = backward = forward.expand(*qkv.shape[:1], end - start, nheads)
            if forward_gate_offset:
                forward = F.pad(forward[:, :-1], (0, 0, 1, 0))
        options = {"shift": False, "self_term": "mean", "gate_offset": gate_offset}
        y = quasiseparable_definition(
            v, q, k, q, k, forward, backward, normalize="row_sum", eps=eps, **options
        )  # fmt: skip
        outputs.append(y.flatten(-2))
        ones = torch.ones_like(v[..., :1])
        sums.append(quasiseparable_definition(ones, q, k, q, k, forward, backward, **options).squeeze(-1))
    return (torch.cat(outputs, 1), torch.cat(sums, 1)) if return_row_sums else torch.cat(outputs, 1)
