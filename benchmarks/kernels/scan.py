"""`scan`: Hydra's bidirectional scan by every road, and attention at the same width.

All but attention start from the same tensors, those of the published layer between convolution and norm: values,
two pairs of vectors, step sizes, a decay rate per head and the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from matmix.benchmarks.measuring.command import parser_of, run_command
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.small import BATCH, SEQLEN
from matmix.benchmarks.measuring.suite import Candidate, Case, on_leaves
from matmix.benchmarks.peers.compiled import compiled_scan
from matmix.benchmarks.peers.flipped import fla_causal, flipped, mamba_causal, our_causal, plain_causal
from matmix.benchmarks.peers.packages import Missing
from matmix.kernels import quasiseparable_scan

EXPAND, HEADDIM, D_STATE, GROUPS = 2, 64, 64, 1
LONGEST_PLAIN = 8192
"""Beyond this length the plain SSD's matrix over chunks, which grows with the square of their number, is all that
would be measured."""
LONGEST_UNROLLED = 2048
"""torch.compile unrolls our PyTorch form's loop over chunks: beyond this length that takes minutes."""


def hydra_inputs(batch: int, seqlen: int, settings: Settings) -> tuple[list[Tensor], Tensor]:
    """[v, q_forward, k_forward, q_backward, k_backward, dt_forward, dt_backward, decay, diagonal] and a cotangent.

    v (batch, seqlen, heads, 64); q, k (batch, seqlen, 1, 64); dt, diagonal (batch, seqlen, heads) float32 and decay
    (heads,) float32, as the layer computes them.
    """
    torch.manual_seed(0)
    heads = EXPAND * settings.d_model // HEADDIM
    like = {"device": settings.device, "dtype": settings.dtype}
    exact = {"device": settings.device, "dtype": torch.float32}
    v, cotangent = (torch.randn(batch, seqlen, heads, HEADDIM, **like) for _ in range(2))
    vectors = [torch.randn(batch, seqlen, GROUPS, D_STATE, **like) * D_STATE**-0.25 for _ in range(4)]
    # Step sizes as the layer starts with: between 0.001 and 0.1.
    steps = [torch.exp(torch.rand(batch, seqlen, heads, **exact) * 4.6 - 6.9) for _ in range(2)]
    decay = -1 - torch.rand(heads, **exact)
    diagonal = 1 + 0.1 * torch.randn(batch, seqlen, heads, **exact)
    return [x.requires_grad_() for x in (v, *vectors, *steps, decay, diagonal)], cotangent


def ours(backend: str = "auto") -> Callable[..., Tensor]:
    """Our op on these inputs."""

    def mix(v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal):
        return quasiseparable_scan(
            v,
            qf,
            kf,
            qb,
            kb,
            dt_forward * decay,
            dt_backward * decay,
            input_scale_forward=dt_forward,
            input_scale_backward=dt_backward,
            diagonal=diagonal,
            backend=backend,
        )

    return mix


def op_alone(leaves: list[Tensor], cotangent: Tensor) -> Candidate:
    """Our op as such, given the log-decays that the others make of step sizes and rates."""
    v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal = (x.detach() for x in leaves)
    inputs = [v, qf, kf, qb, kb, dt_forward * decay, dt_backward * decay, dt_forward, dt_backward, diagonal]

    def mix(v, qf, kf, qb, kb, af, ab, wf, wb, diagonal):
        return quasiseparable_scan(
            v, qf, kf, qb, kb, af, ab, input_scale_forward=wf, input_scale_backward=wb, diagonal=diagonal
        )

    # Its gradients are other ones, so they are not compared.
    given = [x.requires_grad_() for x in inputs]
    return on_leaves("ours, log-decays given", mix, given, cotangent, compared=False)


def flash_only(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU attention takes the flash kernel or fails; elsewhere it takes what there is."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bidirectional attention, (batch, heads, seqlen, 64)."""
    with flash_only(q.device):
        return scaled_dot_product_attention(q, k, v)


def attention(batch: int, seqlen: int, settings: Settings) -> Candidate:
    """Attention of the model's width: d_model / 64 heads of 64."""
    shape = (batch, settings.d_model // HEADDIM, seqlen, HEADDIM)
    parts = [torch.randn(shape, device=settings.device, dtype=settings.dtype) for _ in range(4)]
    leaves = [x.requires_grad_() for x in parts[:3]]
    return on_leaves("flash attention", flash_attention, leaves, parts[3], compared=False)


def scan_case(seqlen: int, settings: Settings) -> Case:
    """All candidates at one length."""
    batch = settings.batch(seqlen)
    leaves, cotangent = hydra_inputs(batch, seqlen, settings)

    def candidate(name: str, make: Callable[[], Callable[..., Tensor]], longest: int | None = None) -> Candidate:
        if longest is not None and seqlen > longest:
            return Candidate(name=name, missing=f"left out beyond length {longest:,}")
        try:
            return on_leaves(name, make(), leaves, cotangent)
        except Missing as missing:
            return Candidate(name=name, missing=str(missing))

    candidates = [candidate("ours", ours), op_alone(leaves, cotangent)]
    if settings.device.type == "cuda":
        candidates.append(candidate("ours, PyTorch form", lambda: ours("torch")))
    if settings.compile:
        candidates.append(candidate("ours, PyTorch form compiled", compiled_scan, LONGEST_UNROLLED))
    candidates.append(candidate("flipped, our causal scan", lambda: flipped(our_causal)))
    candidates.append(candidate("flipped, plain SSD", lambda: flipped(plain_causal), LONGEST_PLAIN))
    if settings.compile:
        plain = flipped(plain_causal)
        candidates.append(
            candidate("flipped, plain SSD compiled", lambda: torch.compile(plain, dynamic=False), LONGEST_PLAIN)
        )
    candidates.append(candidate("flipped, mamba-ssm (published)", lambda: flipped(mamba_causal())))
    candidates.append(candidate("flipped, flash-linear-attention", lambda: flipped(fla_causal())))
    candidates.append(attention(batch, seqlen, settings))
    return Case(label=f"length {seqlen:,}, batch {batch:,}", seqlen=seqlen, batch=batch, candidates=candidates)


def cases(settings: Settings) -> Iterator[Case]:
    """One case per length; a case's tensors live no longer than it."""
    for seqlen in settings.lengths:
        yield scan_case(seqlen, settings)


def main(arguments: list[str]) -> None:
    """The command."""
    options = parser_of("scan", __doc__).parse_args(arguments)
    run_command("scan", options, cases, small_case)


def small_case(settings: Settings) -> Case:
    """16 sequences of 128 tokens."""
    case = scan_case(SEQLEN, replace(settings, tokens=BATCH * SEQLEN, compile=False))
    case.label = f"small: {case.label}"
    return case
