"""Other ways to compute what our operations compute: published packages, other algorithms, torch.compile."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from matmix.kernels import semiseparable_scan
from matmix.kernels.matrix_product.scans import WalkedProduct
from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide

EPS = 1e-5  # of norms
HOW = {
    "mamba-ssm": "pip install --no-build-isolation mamba-ssm",
    "causal-conv1d": "pip install --no-build-isolation causal-conv1d",
    "fla-core": "pip install fla-core",
}
"""Distribution -> how to get it. Only fla-core's operations are used: flash-linear-attention itself asks for a newer
transformers than the exports are made for."""


Op = Callable[..., Tensor]


class Missing(Exception):
    """A peer cannot be used here; the message is for the table."""


@functools.cache
def peer(distribution: str, module: str, name: str) -> Callable[..., Any]:
    """Returns a function of an optional package. Raises `Missing`."""
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        raise Missing(f"not installed: {HOW[distribution]}")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        if distribution != "mamba-ssm":
            raise Missing(f"{distribution} cannot be imported: {error}") from None
    try:
        # mamba_ssm imports the CUDA extension of another operation before anything else. Its SSD and its norm are
        # Triton and need only their source, so the package is entered without running its __init__.
        for loaded in [key for key in sys.modules if key.split(".")[0] == package]:
            del sys.modules[loaded]
        sys.modules[package] = importlib.util.module_from_spec(importlib.util.find_spec(package))
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        sys.modules.pop(package, None)
        raise Missing(f"{distribution} cannot be imported: {error}") from None


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Runs the package's short convolution with SiLU: causal, 2 to 4 wide. Raises `Missing`."""
    run = peer("causal-conv1d", "causal_conv1d", "causal_conv1d_fn")
    return run(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)


def mamba_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """Runs mamba-ssm's norm, which the published layer uses. Raises `Missing`."""
    norm = peer("mamba-ssm", "mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    return norm(x, weight, None, z=gate, eps=EPS, norm_before_gate=True)


def fla_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """Runs flash-linear-attention's norm. Raises `Missing`."""
    norm = peer("fla-core", "fla.modules.norm.fused_norm_gate", "rms_norm_gated")
    return norm(x, gate, weight, None, activation="swish", eps=EPS)


# -- Hydra's mixer out of a causal scan --------------------------------------------------------------------------------

CausalScan = Op
"""(v, q, k, step sizes dt (batch, seqlen, nheads), A (nheads,)) -> y, with log-decays dt A and input scale dt."""


def flipped(causal: CausalScan) -> Op:
    """Returns Hydra's mixer by way of a causal scan, as published: reversed copies double the batch, and the results
    are rolled by one token, reversed again and added. Arguments as `hydra_inputs` of `operations` names them.

        y = roll(scan(v, q_f, k_f)) + flip(roll(scan(flip v, flip q_b, flip k_b))) + diagonal v
    """

    def doubled(forward: Tensor, backward: Tensor) -> Tensor:
        return torch.cat((forward, backward.flip(1)))

    def mix(v, q_forward, k_forward, q_backward, k_backward, dt_forward, dt_backward, decay, diagonal) -> Tensor:
        vectors = doubled(q_forward, q_backward), doubled(k_forward, k_backward)
        y = causal(doubled(v, v), *vectors, doubled(dt_forward, dt_backward), decay)
        y = torch.roll(y, shifts=1, dims=1)
        y[:, 0] = 0.0
        forward, backward = y.chunk(2)
        return forward + backward.flip(1) + v * diagonal.to(v.dtype).unsqueeze(-1)

    return mix


def our_causal(v: Tensor, q: Tensor, k: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    return semiseparable_scan(v, q, k, dt * decay, input_scale=dt)


def mamba_causal(v: Tensor, q: Tensor, k: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    """Runs mamba-ssm's SSD with the chunk length of the published layer. Raises `Missing`."""
    scan = peer("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    return scan(v, dt, decay, k, q, chunk_size=256, D=None)


def fla_causal(v: Tensor, q: Tensor, k: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    """Runs flash-linear-attention's simple GLA, which has no groups and no input scale: vectors are copied to all heads
    and the scale goes into the keys. Raises `Missing`."""
    scan = peer("fla-core", "fla.ops.simple_gla", "chunk_simple_gla")
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return scan(q, (k * dt.unsqueeze(-1)).to(k.dtype), v, g=dt * decay, scale=1.0)[0]


def plain_causal(v: Tensor, q: Tensor, k: Tensor, dt: Tensor, decay: Tensor, chunk: int = 64) -> Tensor:
    """Runs the chunked SSD of "Transformers are SSMs" (arXiv 2405.21060, section 6) in PyTorch, left to autograd.

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
    values = (cut(v) * steps.unsqueeze(-1)).unflatten(3, (groups, -1))  # (batch, count, chunk, groups, share, headdim)
    queries, keys = cut(q), cut(k)
    sums = (steps * decay).cumsum(2)  # log-decay up to and with each token
    until, ends = sums.unflatten(-1, (groups, -1)), sums[:, :, -1].unflatten(-1, (groups, -1))

    scores = torch.einsum("bclgn,bcsgn->bcgls", queries, keys)
    weights = scores.unsqueeze(3) * _decay_matrix(until.permute(0, 1, 3, 4, 2))
    y = torch.einsum("bcghls,bcsghp->bclghp", weights, values)

    # Decays go to the values and outputs, so that all heads of a group share one product with its vectors.
    left = torch.exp(ends.unsqueeze(2) - until).unsqueeze(-1)
    alone = torch.einsum("bcsgn,bcsghp->bcghnp", keys, left * values)
    # Row c: how much of what chunk s < c left behind still is there when c begins.
    passed = _decay_matrix(torch.nn.functional.pad(ends, (0, 0, 0, 0, 1, 0)).cumsum(1).permute(0, 2, 3, 1))
    entering = torch.einsum("bghcs,bsghnp->bcghnp", passed[..., :-1, 1:], alone)
    y = y + torch.exp(until).unsqueeze(-1) * torch.einsum("bclgn,bcghnp->bclghp", queries, entering)
    return y.reshape(batch, count * chunk, heads, headdim)[:, :seqlen].to(v.dtype)


def _decay_matrix(sums: Tensor) -> Tensor:
    """Returns exp(sums_l - sums_s) where s <= l, else 0: (..., length) -> (..., length, length)."""
    length = sums.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()


def recurrent_quasiseparable(v, qf, kf, qb, kb, af, ab, wf, wb, d) -> Tensor:
    """Runs Hydra's mixer as two plain recurrences over tokens, differentiated by autograd. Arguments as in our op:
    values, vectors and log-decays of both directions, input scales, and the diagonal."""

    def scan(q: Tensor, k: Tensor, a: Tensor, w: Tensor, order: range) -> list[Tensor]:
        h = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
        reads = []
        for t in order:
            # The shift: a token reads what its neighbour would have read, without its own input.
            reads.append(h)
            h = torch.exp(a[:, t, :, None, None]) * h + (w[:, t, :, None] * k[:, t])[..., None] * v[:, t, :, None]
        return [(q[:, s, :, None] @ h).squeeze(-2) for s, h in zip([order[0], *order[:-1]], reads, strict=True)]

    forward = torch.stack(scan(qf, kf, af, wf, range(v.shape[1])), 1)
    backward = torch.stack(scan(qb, kb, ab, wb, range(v.shape[1] - 1, -1, -1))[::-1], 1)
    return forward + backward + d[..., None] * v


def compiled_scan() -> Op:
    """Returns our PyTorch form of the bidirectional scan under torch.compile, on the tensors of `hydra_inputs`.

    The registered ops are opaque to torch.compile, which is what models want of them; here both halves of the
    hand-written pair are compiled, each as a whole.
    """

    def call(v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal) -> ScanCall:
        forward = ScanSide(qf, kf, dt_forward * decay, dt_forward, None, False)
        backward = ScanSide(qb, kb, dt_backward * decay, dt_backward, None, True)
        return ScanCall(v, (forward, backward), diagonal, ScanForm(shift=True))

    @functools.partial(torch.compile, dynamic=False)
    def run_forward(*inputs) -> Tensor:
        return scan_forward(call(*inputs), False).y

    @functools.partial(torch.compile, dynamic=False)
    def run_backward(dy, *inputs) -> tuple[Tensor, ...]:
        *_, dt_forward, dt_backward, decay, _ = inputs
        dv, (f, b), ddiagonal = scan_backward(dy, None, None, call(*inputs))
        steps = [d.input_scale + d.log_decay * decay for d in (f, b)]
        rates = (f.log_decay * dt_forward + b.log_decay * dt_backward).sum((0, 1))
        return dv, f.q, f.k, b.q, b.k, *steps, rates, ddiagonal

    class CompiledScan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return run_forward(*inputs)

        @staticmethod
        def backward(ctx, dy):
            return run_backward(dy, *ctx.saved_tensors)

    return CompiledScan.apply


# -- Scans of matrix products ------------------------------------------------------------------------------------------


def recurrent_product(x: Tensor) -> Tensor:
    """Runs H_t = H_{t-1} X_t as a loop over tokens, differentiated by autograd: (..., seqlen, o, o)."""
    h, states = None, []
    for matrix in x.unbind(-3):
        h = matrix if h is None else h @ matrix
        states.append(h)
    return torch.stack(states, -3)


def product_by(scan: str) -> Op:
    """Returns H_t = H_{t-1} X_t by mru-lm's scan of that name, x (batch, heads, seqlen, o, o)."""
    return lambda x: WalkedProduct.apply(x, None, scan)
