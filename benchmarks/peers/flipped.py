"""Hydra's mixer out of a causal scan, as it is published: reversed copies double the batch, and the results are
rolled by one token, reversed again and added. Also the causal scans that stand in it.

    y = roll(scan(v, q_f, k_f)) + flip(roll(scan(flip v, flip q_b, flip k_b))) + diagonal v
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matmix.benchmarks.peers.packages import peer
from matmix.kernels import semiseparable_scan

CausalScan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(v, q, k, step sizes dt (batch, seqlen, nheads), A (nheads,)) -> y, with log-decays dt A and input scale dt."""


def doubled(forward: Tensor, backward: Tensor) -> Tensor:
    """Both directions as one batch, the second reversed in time."""
    return torch.cat((forward, backward.flip(1)))


def flipped(causal: CausalScan) -> Callable[..., Tensor]:
    """The mixer by way of `causal`; arguments as `hydra_inputs` of scan.py names them."""

    def mix(
        v: Tensor,
        q_forward: Tensor,
        k_forward: Tensor,
        q_backward: Tensor,
        k_backward: Tensor,
        dt_forward: Tensor,
        dt_backward: Tensor,
        decay: Tensor,
        diagonal: Tensor,
    ) -> Tensor:
        y = causal(
            doubled(v, v),
            doubled(q_forward, q_backward),
            doubled(k_forward, k_backward),
            doubled(dt_forward, dt_backward),
            decay,
        )
        y = torch.roll(y, shifts=1, dims=1)
        y[:, 0] = 0.0
        forward, backward = y.chunk(2)
        return forward + backward.flip(1) + v * diagonal.to(v.dtype).unsqueeze(-1)

    return mix


def our_causal(v: Tensor, q: Tensor, k: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    """Our own one-sided scan."""
    return semiseparable_scan(v, q, k, dt * decay, input_scale=dt)


def mamba_causal() -> CausalScan:
    """mamba-ssm's SSD with the chunk length of the published layer. Raises `Missing`."""
    scan = peer("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    return lambda v, q, k, dt, decay: scan(v, dt, decay, k, q, chunk_size=256, D=None)


def fla_causal() -> CausalScan:
    """flash-linear-attention's simple GLA, which has no groups and no input scale: vectors are copied to all heads
    and the scale goes into the keys. Raises `Missing`."""
    scan = peer("fla-core", "fla.ops.simple_gla", "chunk_simple_gla")

    def causal(v: Tensor, q: Tensor, k: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
        share = v.shape[2] // q.shape[2]
        q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
        k = (k * dt.unsqueeze(-1)).to(k.dtype)
        return scan(q, k, v, g=dt * decay, scale=1.0)[0]

    return causal


def plain_causal(v: Tensor, q: Tensor, k: Tensor, dt: Tensor, decay: Tensor, chunk: int = 64) -> Tensor:
    """The chunked SSD of "Transformers are SSMs" (arXiv 2405.21060, section 6) in PyTorch, left to autograd.

    Four steps: outputs from within each chunk, by its masked scores; the state that each chunk would leave behind
    by itself; the states that enter chunks, by the same kind of matrix over whole chunks; what they add.
    """
    batch, seqlen, heads, headdim = v.shape
    groups = q.shape[2]
    count = -(-seqlen // chunk)
    exact = torch.promote_types(v.dtype, torch.float32)

    def cut(x: Tensor) -> Tensor:
        pad = (0, 0) * (x.dim() - 2) + (0, count * chunk - seqlen)
        return torch.nn.functional.pad(x.to(exact), pad).unflatten(1, (count, chunk))

    steps = cut(dt)
    values = cut(v) * steps.unsqueeze(-1)  # (batch, count, chunk, heads, headdim)
    values = values.unflatten(3, (groups, -1))
    queries, keys = cut(q), cut(k)
    sums = (steps * decay).cumsum(2)  # log-decay up to and with each token
    until, ends = sums.unflatten(-1, (groups, -1)), sums[:, :, -1].unflatten(-1, (groups, -1))

    scores = torch.einsum("bclgn,bcsgn->bcgls", queries, keys)
    weights = scores.unsqueeze(3) * decay_matrix(until.permute(0, 1, 3, 4, 2))
    y = torch.einsum("bcghls,bcsghp->bclghp", weights, values)

    # Decays go to the values and outputs, so that all heads of a group share one product with its vectors.
    left = torch.exp(ends.unsqueeze(2) - until).unsqueeze(-1)
    alone = torch.einsum("bcsgn,bcsghp->bcghnp", keys, left * values)
    # Row c: how much of what chunk s < c left behind still is there when c begins.
    passed = decay_matrix(torch.nn.functional.pad(ends, (0, 0, 0, 0, 1, 0)).cumsum(1).permute(0, 2, 3, 1))
    entering = torch.einsum("bghcs,bsghnp->bcghnp", passed[..., :-1, 1:], alone)
    y = y + torch.exp(until).unsqueeze(-1) * torch.einsum("bclgn,bcghnp->bclghp", queries, entering)
    return y.reshape(batch, count * chunk, heads, headdim)[:, :seqlen].to(v.dtype)


def decay_matrix(sums: Tensor) -> Tensor:
    """exp(sums_l - sums_s) where s <= l, else 0: (..., length) -> (..., length, length)."""
    length = sums.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
