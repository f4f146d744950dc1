"""`scan`, `conv`, `norm` and `mru`: single operations against other ways to compute them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv1d, rms_norm, scaled_dot_product_attention, silu

from matmix.benchmarks import peers
from matmix.benchmarks.measure import Candidate, Case, Speed, on_leaves
from matmix.benchmarks.peers import EPS, Missing, Op
from matmix.kernels import gated_norm, matrix_product_scan, mru_mixer, quasiseparable_scan, short_conv
from matmix.kernels.matrix_product.op import ORDERS
from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, CONSTRUCTIONS, build_state_matrices, state_elements

EXPAND, HEADDIM, D_STATE, GROUPS = 2, 64, 64, 1
LONGEST = {
    # The plain SSD's matrix over chunks, which grows with the square of their number, is all that would be measured.
    **dict.fromkeys(("flipped, plain SSD", "flipped, plain SSD compiled"), 8192),
    # torch.compile unrolls our PyTorch form's loop over chunks, which takes minutes.
    "ours in torch, compiled": 2048,
    # Takes seconds: a few launches per token, one after the other.
    "loop over tokens": 4096,
}
"""Candidate -> the length beyond which it is left out."""


def candidates_of(
    options: Speed, leaves: list[Tensor], cotangent: Tensor, ways: dict[str, Op], *,
    seqlen: int = 0, output_read: bool = False,
) -> list[Candidate]:  # fmt: skip
    """Returns a candidate for each way to compute the same; a "PyTorch form" is for GPUs: elsewhere ours is one."""
    candidates = []
    for name, op in ways.items():
        if "PyTorch form" in name and options.device == "cpu":
            continue
        if seqlen > LONGEST.get(name, seqlen):
            op = partial(_left_out, LONGEST[name])
        candidates.append(on_leaves(name, op, leaves, cotangent, output_read=output_read))
    return candidates


def _left_out(longest: int, *inputs: Tensor) -> Tensor:
    raise Missing(f"left out beyond length {longest:,}")


def ours(op: Op) -> dict[str, Op]:
    """Returns one of our ops, and its PyTorch form."""
    return {"ours": op, "ours, PyTorch form": partial(op, backend="torch")}


def both_ways(name: str, op: Op, **options) -> dict[str, Op]:
    """Returns something in PyTorch, eager and compiled."""
    return {name: op, f"{name} compiled": torch.compile(op, dynamic=False, **options)}


# -- Hydra's scan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scan(Speed):
    """Hydra's bidirectional scan by every road, and attention at the same width.

    All but attention start from the same tensors, those of the published layer between convolution and norm: values,
    two pairs of vectors, step sizes, a decay rate per head and the diagonal.
    """

    with_small: ClassVar[bool] = True

    def case(self, seqlen: int) -> Case:
        leaves, cotangent = hydra_inputs(self.batch(seqlen), seqlen, self)
        # The op alone has other gradients than those that start from step sizes and rates, so they are not compared.
        *vectors, dt_forward, dt_backward, decay, diagonal = (x.detach() for x in leaves)
        given = [*vectors, dt_forward * decay, dt_backward * decay, dt_forward, dt_backward, diagonal]
        given = [x.requires_grad_() for x in given]
        alone = on_leaves("ours, log-decays given", scan_given_decays, given, cotangent, compared=False)
        ways = {
            **ours(hydra_scan),
            "ours in torch, compiled": peers.compiled_scan(),
            "flipped, our causal scan": peers.flipped(peers.our_causal),
            **both_ways("flipped, plain SSD", peers.flipped(peers.plain_causal)),
            "flipped, mamba-ssm (published)": peers.flipped(peers.mamba_causal),
            "flipped, flash-linear-attention": peers.flipped(peers.fla_causal),
        }
        first, *others = candidates_of(self, leaves, cotangent, ways, seqlen=seqlen)
        shape = (self.batch(seqlen), self.d_model // HEADDIM, seqlen, HEADDIM)
        *qkv, cotangent = (torch.randn(shape, **self.like) for _ in range(4))
        qkv = [x.requires_grad_() for x in qkv]
        attention = on_leaves("flash attention", flash_attention, qkv, cotangent, compared=False)
        return self.case_of(seqlen, [first, alone, *others, attention])


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


def scan_given_decays(v, qf, kf, qb, kb, af, ab, wf, wb, diagonal, **options) -> Tensor:
    """Runs our op: values, vectors, log-decays and input scales of both directions, and the diagonal."""
    return quasiseparable_scan(
        v, qf, kf, qb, kb, af, ab, input_scale_forward=wf, input_scale_backward=wb, diagonal=diagonal, **options
    )


def hydra_scan(v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal, **options) -> Tensor:
    """Runs our op on the tensors of `hydra_inputs`."""
    decays = dt_forward * decay, dt_backward * decay
    return scan_given_decays(v, qf, kf, qb, kb, *decays, dt_forward, dt_backward, diagonal, **options)


def flash_only(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Lets attention take the flash kernel or fail on a GPU; elsewhere it takes what there is."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else contextlib.nullcontext()


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with flash_only(q.device):
        return scaled_dot_product_attention(q, k, v)


# -- The short convolution and the norm --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Conv(Speed):
    """The short convolution with SiLU as Hydra uses it, width 7 centred, and as Mamba does, width 4 causal."""

    def cases(self) -> Iterator[Case]:
        return (self.case(seqlen, causal) for causal in (False, True) for seqlen in self.seqlens)

    def case(self, seqlen: int, causal: bool = False) -> Case:
        """Returns the case of one length, over all channels that Hydra convolves."""
        torch.manual_seed(0)
        width, channels = 4 if causal else 7, EXPAND * self.d_model + 4 * GROUPS * D_STATE
        x, cotangent = (torch.randn(self.batch(seqlen), seqlen, channels, **self.like) for _ in range(2))
        weight, bias = torch.randn(channels, width, **self.like) * width**-0.5, torch.randn(channels, **self.like)
        ways = ours(partial(short_conv, causal=causal, activation="silu"))
        ways |= both_ways("conv1d + silu", partial(plain_conv, causal=causal))
        if causal:
            ways["causal_conv1d"] = peers.causal_conv1d
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        kind = f"{'causal' if causal else 'centred'}, width {width}"
        return self.case_of(seqlen, candidates_of(self, leaves, cotangent, ways), kind)


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor, causal: bool = False) -> Tensor:
    """Runs conv1d over channels-first views, then SiLU, as in the published layer."""
    channels, width = weight.shape
    padding = width - 1 if causal else width // 2
    y = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=padding, groups=channels)
    return silu(y[..., : x.shape[1]]).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Norm(Speed):
    """The gated RMSNorm that ends a Hydra layer; every row is a token of d_inner channels, and the lengths are rows."""

    def batch(self, seqlen: int) -> int:
        return 1

    def case(self, seqlen: int) -> Case:
        torch.manual_seed(0)
        channels = EXPAND * self.d_model
        x, gate, cotangent = (torch.randn(seqlen, channels, **self.like) for _ in range(3))
        ways = {
            **ours(partial(gated_norm, eps=EPS)),
            **both_ways("rms_norm * silu", plain_norm),
            "mamba-ssm (published)": peers.mamba_norm,
            "flash-linear-attention": peers.fla_norm,
        }
        leaves = [t.requires_grad_() for t in (x, 1 + 0.1 * torch.randn(channels, **self.like), gate)]
        label, candidates = f"{seqlen:,} rows of {channels:,}", candidates_of(self, leaves, cotangent, ways)
        return self.case_of(seqlen, candidates, label=label)


def plain_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, EPS) * silu(gate)


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
    def with_small(self) -> bool:
        return self.kind != "scan"

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
        makers = {"scan": self.scan_case, "mixer": self.mixer_case}
        for kind, size, seqlen in product(makers, self.shapes, self.seqlens):
            if self.kind in ("both", kind):
                yield makers[kind](seqlen, size)

    def case(self, seqlen: int) -> Case:
        return self.mixer_case(seqlen, self.shapes[0])

    def in_dtype(self, usual: str) -> Mru:
        return replace(self, dtype=self.dtype or usual)

    def scan_case(self, seqlen: int, size: Size) -> Case:
        """Returns the scan's case, from orthogonal X (batch, seqlen, heads, o, o)."""
        torch.manual_seed(0)
        options = self.in_dtype("float32")
        elements = state_elements("cayley", size.order)
        elements = torch.randn(self.batch(seqlen), seqlen, size.heads, elements, device=options.like["device"])
        x = build_state_matrices(elements, "cayley", size.order).to(options.like["dtype"]).requires_grad_()
        cotangent = torch.randn_like(x)
        # What suits scans that are batched products of every 2nd, 4th ... token: each head's tokens side by side.
        theirs, their_cotangent = (y.detach().transpose(1, 2).contiguous().transpose(1, 2) for y in (x, cotangent))

        def tokens_first(scan: Op) -> Op:
            return lambda x: scan(x.transpose(1, 2)).transpose(1, 2)

        sizes = {"seqlen": seqlen, "output_read": True}
        candidates = candidates_of(options, [x], cotangent, ours(matrix_product_scan), **sizes)
        scans = public_scans(tokens_first)
        candidates += candidates_of(options, [theirs.requires_grad_()], their_cotangent, scans, **sizes)
        return options.case_of(seqlen, candidates, f"scan, {size}, {options.dtype}")

    def mixer_case(self, seqlen: int, size: Size) -> Case:
        """Returns the mixer's case, from elements (batch, seqlen, heads, E) and w_down (heads, o, o) float32."""
        torch.manual_seed(0)
        options = self.in_dtype("bfloat16")
        batch, (order, heads), named = self.batch(seqlen), size, {"construction": self.construction}
        # What does not bound products gets elements small enough that these stay near the identity.
        scale = 0.3 if self.construction in BOUNDED_CONSTRUCTIONS else 0.3 * seqlen**-0.5
        width = state_elements(self.construction, order)
        elements = scale * torch.randn(batch, seqlen, heads, width, **options.like)
        w_down = torch.randn(heads, order, order, device=elements.device) * order**-0.5
        cotangent = torch.randn(batch, seqlen, heads, order, order, **options.like)
        ways = ours(partial(mru_mixer, **named)) | {"ours, not fused": partial(our_parts, **named)}
        ways |= public_scans(partial(unfused, **named))
        leaves = [elements.requires_grad_(), w_down.requires_grad_()]
        candidates = candidates_of(options, leaves, cotangent, ways, seqlen=seqlen)
        return options.case_of(seqlen, candidates, f"mixer, {self.construction}, {size}, {options.dtype}")


def public_scans(around: Callable[[Op], Op]) -> dict[str, Op]:
    """Returns the scans of matrices (batch, heads, seqlen, o, o) that there are; `around` puts what belongs to the case
    around a scan, and is compiled with it, as a whole: a part that silently ran uncompiled would be eager."""
    walks = {"Brent-Kung": "brent_kung", "Hillis-Steele": "hillis_steele"}
    ways: dict[str, Op] = {}
    for name, walk in walks.items():
        ways |= both_ways(name, around(peers.product_by(walk)), fullgraph=True)
    return ways | {"loop over tokens": around(peers.recurrent_product)}


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
