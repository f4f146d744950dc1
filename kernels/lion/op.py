"""LION's mixing as an op: checks, backend choice, registration with PyTorch."""

import torch
from torch import Tensor

from matmix.kernels.backend import check_backend, takes_triton
from matmix.kernels.checks import (
    check_choice,
    check_cu_seqlens,
    check_eps,
    check_finite,
    check_floating,
    check_shape,
)
from matmix.kernels.context import Context
from matmix.kernels.lion.chunked import (
    FEATURE_MAPS,
    LION_MIXER,
    LionInputs,
    LionOutputs,
    gate_decays,
    lion_mixer_torch,
)
from matmix.kernels.registration import register
from matmix.kernels.semiseparable.chunked.setup import scan_flops
from matmix.kernels.semiseparable.form import ScanForm, no_kernel


def lion_mixer_is_fused(qkv: Tensor, nheads: int, backend: str = "auto") -> bool:
    """Returns whether `lion_mixer` runs in Triton kernels on a projection like this one."""
    headdim = qkv.shape[-1] // 3 // nheads
    return takes_triton(backend, qkv) and not no_kernel(headdim, headdim)


def lion_mixer(
    qkv: Tensor,
    gates: Tensor | None,
    *,
    nheads: int,
    feature_map: str = "silu_norm",
    gate_offset: int = 1,
    forward_gate_offset: int = 0,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    return_row_sums: bool = False,
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """All that stands between LION's two projections (arXiv 2502.16249): feature maps, gates, and the mixing of both
    directions divided by row sums, y_i = sum_j M_ij phi(q_i) . phi(k_j) v_j / (the same sum without v_j, plus eps).

    M_ij is 1 for i = j and else the product of the gates sigmoid(g) between the two tokens.

    Args:
        qkv: (batch, seqlen, 3 nheads headdim), columns of q, k and v, each head by head.
        gates: their logits g, (batch, seqlen, nheads), (nheads,) if they are the same for all tokens, or None for none.
        nheads: number of heads.
        feature_map: "elu" (elu(x) + 1), "silu" (silu(x) + 1/2), or "silu_norm", the latter divided by its length. That
            of q is multiplied by headdim^-1/2.
        gate_offset: from a later token j back to i < j decay the gates of i+1 .. j (1) or of i .. j-1 (0).
        forward_gate_offset: from an earlier token j on to i > j decay the gates of j+1 .. i (0) or of j .. i-1 (1).
        eps: added to the row sums, not negative.
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1).
        return_row_sums: also return the sums that rows are divided by, without eps: what several mixers of one sequence
            are added by before they are divided. They have gradients.
        context: the ranks that rows are cut over; see `semiseparable_scan`.
        backend: "auto", "torch" or "triton".

    Returns:
        (batch, seqlen, nheads headdim) typed like qkv; with `return_row_sums` also the sums (batch, seqlen, nheads), in
        float32 at least.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "lion_mixer"
    check_floating(op, qkv=qkv, gates=gates)
    check_choice(op, "feature_map", feature_map, tuple(FEATURE_MAPS))
    check_choice(op, "gate_offset", gate_offset, (0, 1))
    check_choice(op, "forward_gate_offset", forward_gate_offset, (0, 1))
    if qkv.dim() != 3 or 0 in qkv.shape or nheads < 1 or qkv.shape[2] % (3 * nheads):
        raise ValueError(
            f"{op}: qkv has shape {tuple(qkv.shape)}; expected (batch, seqlen, 3 * {nheads} * headdim), none of them 0"
        )
    if gates is not None:
        check_shape(op, "gates", gates, (*qkv.shape[:2], nheads), (nheads,))
    check_eps(op, eps)
    check_cu_seqlens(op, cu_seqlens, qkv.shape[0], qkv.shape[1], qkv, part=context is not None)
    check_finite(op, qkv=qkv, gates=gates)
    headdim = qkv.shape[2] // 3 // nheads
    check_backend(op, backend, qkv, no_kernel(headdim, headdim))
    options = {
        "nheads": nheads, "feature_map": feature_map, "gate_offset": gate_offset,
        "forward_gate_offset": forward_gate_offset, "eps": float(eps), "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    if not lion_mixer_is_fused(qkv, nheads, backend):
        return lion_mixer_torch(qkv, gates, **options, return_row_sums=return_row_sums, context=context)
    given = LionInputs(qkv, gates, **options)
    if context is not None:
        decays = gate_decays(given, context)
        decays = None if decays is None else torch.stack(decays)
        given = given._replace(gates=None, log_decays=decays, context=context.name)
    y, row_sum, *_ = _lion_mixer(given)
    return (y.flatten(-2), row_sum) if return_row_sums else y.flatten(-2)


def _like(given: LionInputs, _: bool) -> LionOutputs:
    qkv, gates = given.qkv, given.gates
    shape = (*qkv.shape[:2], given.nheads)
    y = qkv.new_empty(*shape, qkv.shape[2] // 3 // given.nheads)
    rest = torch.empty_like(y) if qkv.itemsize < 4 else None
    decays = None if gates is None else gates.new_empty(2, *gates.shape, dtype=torch.float32)
    return LionOutputs(y, qkv.new_empty(shape, dtype=torch.float32), rest, decays)


def _flops(given: LionInputs, *, backward: bool) -> int:
    batch, seqlen, width = given.qkv
    vectors = (batch, seqlen, given.nheads, width // 3 // given.nheads)
    return scan_flops(vectors, vectors, 2, ScanForm(normalize=True), None, backward=backward)


_lion_mixer = register(LION_MIXER, "lion.fused", _like, flops=_flops)
