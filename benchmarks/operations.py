"""`scan`, `conv`, `norm` and `mru`: single operations against other ways to compute them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv1d, rms_norm, scaled_dot_product_attention, silu

from matmix.benchmarks.measure import SMALL_SEQLEN, Candidate, Case, Speed, device_of, on_leaves
from matmix.benchmarks.peers import (
    Missing,
    brent_kung,
    compiled_scan,
    fla_causal,
    flipped,
    hillis_steele,
    mamba_causal,
    our_causal,
    peer,
    plain_causal,
    product_by,
    recurrent_product,
)
from matmix.kernels import gated_norm, matrix_product_scan, mru_mixer, quasiseparable_scan, short_conv
from matmix.kernels.matrix_product.op import ORDERS
from matmix.kernels.mru.constructions import (
    BOUNDED_CONSTRUCTIONS,
    CONSTRUCTIONS,
    build_state_matrices,
    state_elements,
)

EXPAND, HEADDIM, D_STATE, GROUPS = 2, 64, 64, 1
EPS = 1e-5
LONGEST_PLAIN = 8192
"""Beyond this length the plain SSD's matrix over chunks, which grows with the square of their number, is all that
would be measured."""
LONGEST_UNROLLED = 2048
"""torch.compile unrolls our PyTorch form's loop over chunks: beyond this length that takes minutes."""
LONGEST_LOOP = 4096
"""Beyond this length the loop over tokens takes seconds: a few launches per token, one after the other."""

Op = Callable[..., Tensor]


def candidates_of(
    options: Speed, leaves: list[Tensor], cotangent: Tensor, ways: dict[str, tuple[Callable[[], Op], int | None]],
    *, seqlen: int = 0, output_read: bool = False,
) -> list[Candidate]:  # fmt: skip
    """Returns a candidate for each way to compute the same: its name -> what makes its function, and the length up to
    which it is measured. Those named "PyTorch form" are for GPUs, elsewhere ours is one; those named "compiled" are
    left out with --no-compile."""
    candidates = []
    for name, (make, longest) in ways.items():
        if ("PyTorch form" in name and options.device == "cpu") or ("compiled" in name and not options.compile):
            continue
        if longest is not None and seqlen > longest:
            candidates.append(Candidate(name=name, missing=f"left out beyond length {longest:,}"))
            continue
        try:
            candidates.append(on_leaves(name, make(), leaves, cotangent, output_read=output_read))
        except Missing as missing:
            candidates.append(Candidate(name=name, missing=str(missing)))
    return candidates


def compiled(op: Op, **options) -> Callable[[], Op]:
    """Returns what makes a compiled function."""
    return lambda: torch.compile(op, dynamic=False, **options)


# -- Hydra's scan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scan(Speed):
    """Hydra's bidirectional scan by every road, and attention at the same width.

    All but attention start from the same tensors, those of the published layer between convolution and norm: values,
    two pairs of vectors, step sizes, a decay rate per head and the diagonal.
    """

    command: ClassVar[str] = "scan"

    def cases(self) -> Iterator[Case]:
        return map(self.case, self.seqlens)

    def case(self, seqlen: int) -> Case:
        """Returns the case of one length."""
        batch = self.batch(seqlen)
        leaves, cotangent = hydra_inputs(batch, seqlen, self)
        plain = flipped(plain_causal)
        first, *others = candidates_of(
            self,
            leaves,
            cotangent,
            {
                "ours": (hydra_scan, None),
                "ours, PyTorch form": (lambda: hydra_scan("torch"), None),
                "ours in torch, compiled": (compiled_scan, LONGEST_UNROLLED),
                "flipped, our causal scan": (lambda: flipped(our_causal), None),
                "flipped, plain SSD": (lambda: plain, LONGEST_PLAIN),
                "flipped, plain SSD compiled": (compiled(plain), LONGEST_PLAIN),
                "flipped, mamba-ssm (published)": (lambda: flipped(mamba_causal()), None),
                "flipped, flash-linear-attention": (lambda: flipped(fla_causal()), None),
            },
            seqlen=seqlen,
        )
        # The op alone has other gradients than those that start from step sizes and rates, so they are not compared.
        given = with_log_decays(leaves)
        alone = on_leaves("ours, log-decays given", scan_given_decays, given, cotangent, compared=False)
        shape = (batch, self.d_model // HEADDIM, seqlen, HEADDIM)
        *qkv, cotangent = (torch.randn(shape, **self.like) for _ in range(4))
        attention = on_leaves(
            "flash attention", flash_attention, [x.requires_grad_() for x in qkv], cotangent, compared=False
        )
        label, candidates = f"length {seqlen:,}, batch {batch:,}", [first, alone, *others, attention]
        return Case(label=label, seqlen=seqlen, batch=batch, candidates=candidates)

    def small_case(self) -> Case:
        return self.small().case(SMALL_SEQLEN)


def hydra_inputs(batch: int, seqlen: int, options: Speed) -> tuple[list[Tensor], Tensor]:
    """Returns [v, q_forward, k_forward, q_backward, k_backward, dt_forward, dt_backward, decay, diagonal] and a
    cotangent.

    v (batch, seqlen, heads, 64); q, k (batch, seqlen, 1, 64); dt, diagonal (batch, seqlen, heads) float32 and decay
    (heads,) float32, as the layer computes them.
    """
    torch.manual_seed(0)
    heads = EXPAND * options.d_model // HEADDIM
    exact = options.like | {"dtype": torch.float32}
    v, cotangent = (torch.randn(batch, seqlen, heads, HEADDIM, **options.like) for _ in range(2))
    vectors = [torch.randn(batch, seqlen, GROUPS, D_STATE, **options.like) * D_STATE**-0.25 for _ in range(4)]
    # Step sizes as the layer starts with: between 0.001 and 0.1.
    steps = [torch.exp(torch.rand(batch, seqlen, heads, **exact) * 4.6 - 6.9) for _ in range(2)]
    decay = -1 - torch.rand(heads, **exact)
    diagonal = 1 + 0.1 * torch.randn(batch, seqlen, heads, **exact)
    return [x.requires_grad_() for x in (v, *vectors, *steps, decay, diagonal)], cotangent


def with_log_decays(leaves: list[Tensor]) -> list[Tensor]:
    """Returns the arguments of `scan_given_decays` from those of `hydra_inputs`."""
    *vectors, dt_forward, dt_backward, decay, diagonal = (x.detach() for x in leaves)
    given = [*vectors, dt_forward * decay, dt_backward * decay, dt_forward, dt_backward, diagonal]
    return [x.requires_grad_() for x in given]


def scan_given_decays(v, qf, kf, qb, kb, af, ab, wf, wb, diagonal, **options) -> Tensor:
    """Runs our op: values, vectors, log-decays and input scales of both directions, and the diagonal."""
    return quasiseparable_scan(
        v, qf, kf, qb, kb, af, ab, input_scale_forward=wf, input_scale_backward=wb, diagonal=diagonal, **options
    )


def hydra_scan(backend: str = "auto") -> Op:
    """Returns our op on the tensors of `hydra_inputs`."""

    def mix(v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal) -> Tensor:
        decays = dt_forward * decay, dt_backward * decay
        return scan_given_decays(v, qf, kf, qb, kb, *decays, dt_forward, dt_backward, diagonal, backend=backend)

    return mix


def flash_only(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Lets attention take the flash kernel or fail on a GPU; elsewhere it takes what there is."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else contextlib.nullcontext()


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Runs bidirectional attention, (batch, heads, seqlen, 64)."""
    with flash_only(q.device):
        return scaled_dot_product_attention(q, k, v)


# -- The short convolution and the norm --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Conv(Speed):
    """The short convolution with SiLU as Hydra uses it, width 7 centred, and as Mamba does, width 4 causal."""

    command: ClassVar[str] = "conv"

    def cases(self) -> Iterator[Case]:
        return (self.case(seqlen, causal) for causal in (False, True) for seqlen in self.seqlens)

    def case(self, seqlen: int, causal: bool) -> Case:
        """Returns the case of one length, over all channels that Hydra convolves."""
        torch.manual_seed(0)
        batch, width = self.batch(seqlen), 4 if causal else 7
        channels = EXPAND * self.d_model + 4 * GROUPS * D_STATE
        x, cotangent = (torch.randn(batch, seqlen, channels, **self.like) for _ in range(2))
        weight, bias = torch.randn(channels, width, **self.like) * width**-0.5, torch.randn(channels, **self.like)
        ways: dict[str, tuple[Callable[[], Op], int | None]] = {
            "ours": (lambda: our_conv(causal), None),
            "ours, PyTorch form": (lambda: our_conv(causal, "torch"), None),
            "conv1d + silu": (lambda: plain_conv(causal), None),
            "conv1d + silu compiled": (compiled(plain_conv(causal)), None),
        }
        if causal:
            ways["causal_conv1d"] = (causal_conv1d, None)
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        kind = f"{'causal' if causal else 'centred'}, width {width}"
        label, candidates = f"{kind}, L {seqlen:,}, B {batch:,}", candidates_of(self, leaves, cotangent, ways)
        return Case(label=label, kind=kind, seqlen=seqlen, batch=batch, candidates=candidates)


def our_conv(causal: bool, backend: str = "auto") -> Op:
    """Returns our op."""
    return lambda x, weight, bias: short_conv(x, weight, bias, causal=causal, activation="silu", backend=backend)


def plain_conv(causal: bool) -> Op:
    """Returns conv1d over channels-first views, then SiLU, as in the published layer."""

    def conv_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        channels, width = weight.shape
        padding = width - 1 if causal else width // 2
        y = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=padding, groups=channels)
        return silu(y[..., : x.shape[1]]).transpose(1, 2)

    return conv_silu


def causal_conv1d() -> Op:
    """Returns the package's kernel: causal, 2 to 4 wide. Raises `Missing`."""
    run = peer("causal-conv1d", "causal_conv1d", "causal_conv1d_fn")
    return lambda x, weight, bias: run(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Norm(Speed):
    """The gated RMSNorm that ends a Hydra layer; every row is a token of d_inner channels, and the lengths are rows."""

    command: ClassVar[str] = "norm"

    def cases(self) -> Iterator[Case]:
        return map(self.case, self.seqlens)

    def case(self, rows: int) -> Case:
        """Returns the case of so many rows."""
        torch.manual_seed(0)
        channels = EXPAND * self.d_model
        x, gate, cotangent = (torch.randn(rows, channels, **self.like) for _ in range(3))
        weight = 1 + 0.1 * torch.randn(channels, **self.like)
        ways: dict[str, tuple[Callable[[], Op], int | None]] = {
            "ours": (our_norm, None),
            "ours, PyTorch form": (lambda: our_norm("torch"), None),
            "rms_norm * silu": (lambda: plain_norm, None),
            "rms_norm * silu compiled": (compiled(plain_norm), None),
            "mamba-ssm (published)": (mamba_norm, None),
            "flash-linear-attention": (fla_norm, None),
        }
        leaves = [t.requires_grad_() for t in (x, weight, gate)]
        label, candidates = f"{rows:,} rows of {channels:,}", candidates_of(self, leaves, cotangent, ways)
        return Case(label=label, seqlen=rows, batch=1, candidates=candidates)


def our_norm(backend: str = "auto") -> Op:
    """Returns our op."""
    return lambda x, weight, gate: gated_norm(x, weight, gate, eps=EPS, backend=backend)


def plain_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """Runs one line of PyTorch."""
    return rms_norm(x, x.shape[-1:], weight, EPS) * silu(gate)


def mamba_norm() -> Op:
    """Returns mamba-ssm's norm, which the published layer uses. Raises `Missing`."""
    norm = peer("mamba-ssm", "mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    return lambda x, weight, gate: norm(x, weight, None, z=gate, eps=EPS, norm_before_gate=True)


def fla_norm() -> Op:
    """Returns flash-linear-attention's norm. Raises `Missing`."""
    norm = peer("fla-core", "fla.modules.norm.fused_norm_gate", "rms_norm_gated")
    return lambda x, weight, gate: norm(x, gate, weight, None, activation="swish", eps=EPS)


# -- The matrix recurrent unit -----------------------------------------------------------------------------------------


class Size(NamedTuple):
    """A model whose states are together as wide as itself: d_model = heads order^2."""

    order: int
    heads: int

    def __str__(self) -> str:
        return f"o {self.order}, {self.heads} heads"


@dataclass(frozen=True, kw_only=True)
class Mru(Speed):
    """The matrix recurrent unit, H_t = H_{t-1} X_t in every head, against the public ways to scan matrices.

    Two kinds of cases, at each size: the scan from X to H, and the whole mixer from the elements that a projection
    gives to the outputs y_t = H_t w_down, which the others compute one step after the other: build X, scan, project.
    Every case has the same number of tokens, so the cost per token can be read off over the length.
    """

    command: ClassVar[str] = "mru"
    linear: ClassVar[bool] = True
    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """Default: float32 for scans, as states are in models, and bfloat16 for mixers."""
    lengths: str = "256,1024,4096,16384,65536"
    """Sequence lengths, L,L,..."""
    kind: Literal["both", "scan", "mixer"] = "both"
    """Which cases."""
    sizes: str = "8x6,16x3"
    """Order x heads of the states, OxH,..., at width d_model = H o^2."""
    construction: Literal[CONSTRUCTIONS] = "cayley"
    """How the mixer makes X of its elements."""

    def check(self) -> None:
        Speed.check(self)
        _ = self.shapes

    @property
    def shapes(self) -> list[Size]:
        shapes = []
        for part in self.sizes.split(","):
            match = re.fullmatch(r"(\d+)x(\d+)", part)
            if not match or int(match[1]) not in ORDERS or int(match[2]) < 1:
                allowed = ", ".join(map(str, ORDERS))
                raise ValueError(f"--sizes {self.sizes}: give orders ({allowed}) x heads, such as 8x6,16x3")
            shapes.append(Size(int(match[1]), int(match[2])))
        return shapes

    def cases(self) -> Iterator[Case]:
        for kind in ("scan", "mixer"):
            options = replace(self, dtype=self.dtype or ("float32" if kind == "scan" else "bfloat16"))
            if self.kind in ("both", kind):
                for size in self.shapes:
                    for seqlen in self.seqlens:
                        yield options.scan_case(seqlen, size) if kind == "scan" else options.mixer_case(seqlen, size)

    def small_case(self) -> Case | None:
        if self.kind == "scan":
            return None
        return replace(self.small(), dtype=self.dtype or "bfloat16").mixer_case(SMALL_SEQLEN, self.shapes[0])

    def scan_case(self, seqlen: int, size: Size) -> Case:
        """Returns the scan's case, from orthogonal X (batch, seqlen, heads, o, o)."""
        torch.manual_seed(0)
        shape = (self.batch(seqlen), seqlen, size.heads, state_elements("cayley", size.order))
        elements = torch.randn(shape, device=device_of(self.device))
        x = build_state_matrices(elements, "cayley", size.order).to(self.like["dtype"]).requires_grad_()
        cotangent = torch.randn_like(x)
        mine = {
            "ours": (lambda: matrix_product_scan, None),
            "ours, PyTorch form": (lambda: partial(matrix_product_scan, backend="torch"), None),
        }

        def tokens_first(scan: Op) -> Op:
            return lambda x: scan(x.transpose(1, 2)).transpose(1, 2)

        candidates = candidates_of(self, [x], cotangent, mine, output_read=True)
        theirs, their_cotangent = [by_head(x)], by_head(cotangent).detach()
        scans = public_scans(tokens_first)
        candidates += candidates_of(self, theirs, their_cotangent, scans, seqlen=seqlen, output_read=True)
        return self._case("scan", seqlen, size, candidates)

    def mixer_case(self, seqlen: int, size: Size) -> Case:
        """Returns the mixer's case, from elements (batch, seqlen, heads, E) and w_down (heads, o, o) float32."""
        torch.manual_seed(0)
        batch, (order, heads), construction = self.batch(seqlen), size, self.construction
        # What does not bound products gets elements small enough that these stay near the identity.
        scale = 0.3 if construction in BOUNDED_CONSTRUCTIONS else 0.3 * seqlen**-0.5
        elements = scale * torch.randn(batch, seqlen, heads, state_elements(construction, order), **self.like)
        w_down = torch.randn(heads, order, order, device=elements.device) * order**-0.5
        cotangent = torch.randn(batch, seqlen, heads, order, order, **self.like)
        ours = partial(mru_mixer, construction=construction)
        ways = {
            "ours": (lambda: ours, None),
            "ours, PyTorch form": (lambda: partial(ours, backend="torch"), None),
            "ours, not fused": (lambda: partial(our_parts, construction=construction), None),
            **public_scans(partial(unfused, construction=construction)),
        }
        leaves = [elements.requires_grad_(), w_down.requires_grad_()]
        candidates = candidates_of(self, leaves, cotangent, ways, seqlen=seqlen)
        return self._case(f"mixer, {construction}", seqlen, size, candidates)

    def _case(self, kind: str, seqlen: int, size: Size, candidates: list[Candidate]) -> Case:
        batch, kind = self.batch(seqlen), f"{kind}, {size}, {self.dtype}"
        label = f"L {seqlen:,}, B {batch:,}"
        return Case(label=label, kind=kind, dtype=self.dtype, seqlen=seqlen, batch=batch, candidates=candidates)


def by_head(x: Tensor) -> Tensor:
    """Returns the same tensor (batch, seqlen, heads, ...), a leaf, with each head's tokens side by side in memory: what
    suits scans that are batched products of every 2nd, 4th ... token."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def public_scans(around: Callable[[Op], Op]) -> dict[str, tuple[Callable[[], Op], int | None]]:
    """Returns the scans of matrices (batch, heads, seqlen, o, o) that there are; `around` puts what belongs to the case
    around a scan, and is compiled with it, as a whole: a part that silently ran uncompiled would be eager."""
    ways: dict[str, tuple[Callable[[], Op], int | None]] = {}
    for name, walk in (("Brent-Kung", brent_kung), ("Hillis-Steele", hillis_steele)):
        op = around(product_by(walk))
        ways |= {name: (lambda op=op: op, None), f"{name} compiled": (compiled(op, fullgraph=True), None)}
    return ways | {"loop over tokens": (lambda: around(recurrent_product), LONGEST_LOOP)}


def unfused(scan: Op, construction: str) -> Op:
    """Returns (elements, w_down) -> y by a scan over (batch, heads, seqlen, o, o), states in float32."""

    def mix(elements: Tensor, w_down: Tensor) -> Tensor:
        order = w_down.shape[1]
        x = build_state_matrices(elements.transpose(1, 2).float(), construction, order)
        states = scan(x).to(elements.dtype).flatten(2, 3)
        y = states @ w_down.to(elements.dtype)
        return y.unflatten(2, (-1, order)).transpose(1, 2).contiguous()

    return mix


def our_parts(elements: Tensor, w_down: Tensor, construction: str) -> Tensor:
    """Runs the mixer from our parts, one after the other."""
    x = build_state_matrices(elements.float(), construction, w_down.shape[1])
    return matrix_product_scan(x).to(elements.dtype) @ w_down.to(elements.dtype)
