"""LION's feature maps, and its mixing in PyTorch on any device."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.context import Context
from matmix.kernels.documents import shift_right
from matmix.kernels.functions import Operation, working
from matmix.kernels.semiseparable.chunked import quasiseparable_chunked
from matmix.kernels.semiseparable.chunked.autograd import move_gates
from matmix.kernels.semiseparable.form import ScanForm


def shifted_elu(x: Tensor) -> Tensor:
    """elu(x) + 1, as max(x, 0) + exp(min(x, 0)): small values keep their digits."""
    x = working(x)
    return x.relu() + x.clamp(max=0).exp()


def shifted_silu(x: Tensor) -> Tensor:
    """silu(x) + 1/2, which is above 0.22."""
    return F.silu(working(x)) + 0.5


def normalized_silu(x: Tensor) -> Tensor:
    """`shifted_silu` divided by its length."""
    x = shifted_silu(x)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


FEATURE_MAPS = {"elu": shifted_elu, "silu": shifted_silu, "silu_norm": normalized_silu}
"""`feature_map` in the configuration -> function, computed in float32 at least."""


class LionInputs(NamedTuple):
    """The arguments of `lion_mixer`, and of matmix::lion_mixer, which runs in Triton only."""

    qkv: Tensor
    gates: Tensor | None
    nheads: int
    feature_map: str = "silu_norm"
    gate_offset: int = 1
    forward_gate_offset: int = 0
    eps: float = 1e-6
    cu_seqlens: Tensor | None = None
    log_decays: Tensor | None = None
    """(2, ...), those of both directions in place of gates: of a part of rows, whose scan also reads gates of the ranks
    beside it."""
    context: str = ""
    """The name of the context whose ranks hold parts of the rows; "" for whole rows."""

    @property
    def scan(self) -> ScanForm:
        return ScanForm(self_term="mean", normalize=True, eps=self.eps)


def lion_mixer_torch(
    qkv: Tensor,
    gates: Tensor | None,
    *,
    return_row_sums: bool = False,
    context: Context | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lion_mixer` in PyTorch, without argument checks; see there."""
    given = LionInputs(qkv, gates, **options)
    cu_seqlens, eps = given.cu_seqlens, given.eps
    q, k, v = qkv.unflatten(-1, (3, given.nheads, -1)).unbind(-3)
    features = FEATURE_MAPS[given.feature_map]
    q, k = (features(q) * q.shape[-1] ** -0.5).to(v.dtype), features(k).to(v.dtype)
    decays = gate_decays(given, context) or (None, None)
    options = {"shift": False, "self_term": "mean", "cu_seqlens": cu_seqlens, "context": context}
    if not return_row_sums:
        y = quasiseparable_chunked(v, q, k, q, k, *decays, normalize="row_sum", eps=eps, **options)
        return y.flatten(-2)
    # A row's sum is what it makes of ones.
    q, k, v = working(q), working(k), F.pad(working(v), (0, 1), value=1.0)
    sums = quasiseparable_chunked(v, q, k, q, k, *decays, **options)
    y = sums[..., :-1] / (sums[..., -1:] + eps)
    return y.to(qkv.dtype).flatten(-2), sums[..., -1]


def gate_decays(given: LionInputs, context: Context | None) -> tuple[Tensor, Tensor] | None:
    """The log-decays of both directions, where their scans read them: (batch, seqlen, nheads) or (nheads,)."""
    if given.gates is None:
        return None
    forward = backward = F.logsigmoid(working(given.gates))
    if given.forward_gate_offset and forward.dim() == 3:
        forward = shift_right(forward, given.cu_seqlens, context)
    return forward, move_gates(backward, given.gate_offset, given.cu_seqlens, context)


class LionOutputs(NamedTuple):
    """The results of matmix::lion_mixer."""

    y: Tensor
    """(batch, seqlen, nheads, headdim) typed like qkv."""
    row_sum: Tensor
    """(batch, seqlen, nheads) float32."""
    rest: Tensor | None
    """The part of y that rounding took off, None for float32; see `ScanOutput`."""
    decays: Tensor | None
    """Log-decays (2, ...) of both directions, float32; None without gates."""


LION_MIXER = Operation(
    "lion_mixer", LionInputs, LionOutputs, without_gradient=("rest", "decays"), kept=lambda given: LionOutputs._fields
)
