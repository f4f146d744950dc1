"""`mru`: the matrix recurrent unit, H_t = H_{t-1} X_t in every head, against the public ways to scan matrices.

Two kinds of cases, at each size: the scan from X to H, and the whole mixer from the elements that a projection gives to
the outputs y_t = H_t w_down, which the others compute one step after the other: build X, scan, project. Every case has
the same number of tokens, so the cost per token can be read off over the length.

Without --dtype, scans are float32, as states are in models, and elements bfloat16.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from matmix.benchmarks.measuring.command import parser_of, run_command
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.small import BATCH, SEQLEN
from matmix.benchmarks.measuring.suite import Candidate, Case, on_leaves
from matmix.benchmarks.peers.scans import BrentKungProduct, HillisSteeleProduct, recurrent_product
from matmix.kernels import matrix_product_scan, mru_mixer
from matmix.kernels.matrix_product.op import ORDERS
from matmix.kernels.mru.constructions import (
    BOUNDED_CONSTRUCTIONS,
    CONSTRUCTIONS,
    build_state_matrices,
    state_elements,
)

LENGTHS, SIZES = "256,1024,4096,16384,65536", "8x6,16x3"
LONGEST_LOOP = 4096
"""Beyond this length the loop over tokens takes seconds: a few launches per token, one after the other."""

Op = Callable[..., Tensor]


class Size(NamedTuple):
    """A model whose states are together as wide as itself: d_model = heads order^2."""

    order: int
    heads: int
    construction: str

    @property
    def d_chunk(self) -> int:
        """Columns that the projection makes of each state: d_model / (heads order)."""
        return self.order

    def __str__(self) -> str:
        return f"o {self.order}, {self.heads} heads"


def by_head(x: Tensor) -> Tensor:
    """The same tensor (batch, seqlen, heads, ...), a leaf, with each head's tokens side by side in memory: what suits
    scans that are batched products of every 2nd, 4th ... token."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def public_scans(settings: Settings) -> dict[str, Op]:
    """The scans of matrices (batch, heads, seqlen, o, o) that there are, by name."""
    scans: dict[str, Op] = {}
    for name, scan in (("Brent-Kung", BrentKungProduct.apply), ("Hillis-Steele", HillisSteeleProduct.apply)):
        scans[name] = scan
        if settings.compile:
            scans[f"{name} compiled"] = scan
    return scans | {"loop over tokens": recurrent_product}


def peers_of(
    seqlen: int, settings: Settings, around: Callable[[Op], Op], make: Callable[[str, Op], Candidate]
) -> list[Candidate]:
    """A candidate per public scan; `around` puts what belongs to the case around a scan, and is compiled with it."""
    candidates = []
    for name, scan in public_scans(settings).items():
        if scan is recurrent_product and seqlen > LONGEST_LOOP:
            candidates.append(Candidate(name=name, missing=f"left out beyond length {LONGEST_LOOP:,}"))
            continue
        op = around(scan)
        # A part that silently ran uncompiled would make this another eager candidate.
        compiled = name.endswith("compiled")
        candidates.append(make(name, torch.compile(op, dynamic=False, fullgraph=True) if compiled else op))
    return candidates


def tokens_first(scan: Op) -> Op:
    """A scan over (batch, heads, seqlen, o, o), taken over (batch, seqlen, heads, o, o)."""
    return lambda x: scan(x.transpose(1, 2)).transpose(1, 2)


def scan_case(seqlen: int, size: Size, settings: Settings) -> Case:
    """All candidates for the scan, from orthogonal X (batch, seqlen, heads, o, o)."""
    torch.manual_seed(0)
    batch, order = settings.batch(seqlen), size.order
    elements = torch.randn(batch, seqlen, size.heads, state_elements("cayley", order), device=settings.device)
    x = build_state_matrices(elements, "cayley", order).to(settings.dtype).requires_grad_()
    cotangent = torch.randn_like(x)
    x_by_head, cotangent_by_head = by_head(x), by_head(cotangent).detach()

    def ours(name: str, backend: str) -> Candidate:
        return on_leaves(name, partial(matrix_product_scan, backend=backend), [x], cotangent, output_read=True)

    def peer(name: str, op: Op) -> Candidate:
        return on_leaves(name, op, [x_by_head], cotangent_by_head, output_read=True)

    candidates = [ours("ours", "auto")]
    if settings.device.type == "cuda":
        candidates.append(ours("ours, PyTorch form", "torch"))
    candidates += peers_of(seqlen, settings, tokens_first, peer)
    return case_of("scan", seqlen, size, settings, candidates)


def unfused(scan: Op, construction: str) -> Op:
    """(elements, w_down) -> y, by a scan over (batch, heads, seqlen, o, o), states in float32."""

    def mix(elements: Tensor, w_down: Tensor) -> Tensor:
        order = w_down.shape[1]
        x = build_state_matrices(elements.transpose(1, 2).float(), construction, order)
        states = scan(x).to(elements.dtype).flatten(2, 3)
        y = states @ w_down.to(elements.dtype)
        return y.unflatten(2, (-1, order)).transpose(1, 2).contiguous()

    return mix


def our_parts(elements: Tensor, w_down: Tensor, construction: str) -> Tensor:
    """The mixer from our parts, one after the other."""
    x = build_state_matrices(elements.float(), construction, w_down.shape[1])
    return matrix_product_scan(x).to(elements.dtype) @ w_down.to(elements.dtype)


def mixer_case(seqlen: int, size: Size, settings: Settings) -> Case:
    """All candidates for the mixer, from elements (batch, seqlen, heads, E) and w_down (heads, o, d_c) float32."""
    torch.manual_seed(0)
    batch, (order, heads, construction) = settings.batch(seqlen), size
    # What does not bound products gets elements small enough that these stay near the identity.
    scale = 0.3 if construction in BOUNDED_CONSTRUCTIONS else 0.3 * seqlen**-0.5
    like = {"device": settings.device, "dtype": settings.dtype}
    elements = scale * torch.randn(batch, seqlen, heads, state_elements(construction, order), **like)
    w_down = torch.randn(heads, order, size.d_chunk, device=settings.device) * order**-0.5
    cotangent = torch.randn(batch, seqlen, heads, order, size.d_chunk, **like)
    leaves = [elements.requires_grad_(), w_down.requires_grad_()]

    def candidate(name: str, op: Op) -> Candidate:
        return on_leaves(name, op, leaves, cotangent)

    candidates = [candidate("ours", partial(mru_mixer, construction=construction))]
    if settings.device.type == "cuda":
        form = partial(mru_mixer, construction=construction, backend="torch")
        candidates.append(candidate("ours, PyTorch form", form))
    candidates.append(candidate("ours, not fused", partial(our_parts, construction=construction)))
    candidates += peers_of(seqlen, settings, partial(unfused, construction=construction), candidate)
    return case_of(f"mixer, {construction}", seqlen, size, settings, candidates)


def case_of(kind: str, seqlen: int, size: Size, settings: Settings, candidates: list[Candidate]) -> Case:
    """A case under its kind, size and dtype."""
    dtype, batch = str(settings.dtype).removeprefix("torch."), settings.batch(seqlen)
    return Case(
        label=f"L {seqlen:,}, B {batch:,}",
        kind=f"{kind}, {size}, {dtype}",
        note=f"{kind}, {size}, {dtype}",
        dtype=settings.dtype,
        seqlen=seqlen,
        batch=batch,
        candidates=candidates,
    )


def cases(settings: Settings, sizes: list[Size], kinds: list[str], scan_dtype: torch.dtype) -> Iterator[Case]:
    """The chosen kinds at all sizes and lengths; a case's tensors live no longer than it."""
    for kind in kinds:
        for size in sizes:
            for seqlen in settings.lengths:
                if kind == "scan":
                    yield scan_case(seqlen, size, replace(settings, dtype=scan_dtype))
                else:
                    yield mixer_case(seqlen, size, settings)


def small_case(settings: Settings, size: Size) -> Case:
    """The mixer on 16 sequences of 128 tokens."""
    case = mixer_case(SEQLEN, size, replace(settings, tokens=BATCH * SEQLEN, compile=False))
    case.label = f"small: {case.label}, {case.kind}"
    return case


def sizes_of(text: str, construction: str) -> list[Size]:
    """From "8x6,16x3". Raises ValueError for what is not like that."""
    sizes = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)x(\d+)", part)
        if not found or int(found[1]) not in ORDERS or int(found[2]) < 1:
            allowed = ", ".join(map(str, ORDERS))
            raise ValueError(f"--sizes {text}: give orders ({allowed}) x heads, such as {SIZES}")
        sizes.append(Size(int(found[1]), int(found[2]), construction))
    return sizes


def parser() -> argparse.ArgumentParser:
    """The common arguments, and the sizes of states."""
    parser = parser_of("mru", __doc__, LENGTHS, width=False)
    parser.set_defaults(dtype=None)
    parser.add_argument("--kind", default="both", choices=["both", "scan", "mixer"], help="cases (default: both)")
    parser.add_argument("--sizes", default=SIZES, metavar="OxH,...", help="order x heads of the states, at width "
                        f"d_model = H o^2 (default: {SIZES}, widths 384 and 768)")  # fmt: skip
    parser.add_argument("--construction", default="cayley", choices=CONSTRUCTIONS, help="how the mixer makes X of its "
                        "elements (default: cayley)")  # fmt: skip
    return parser


def main(arguments: list[str]) -> None:
    """The command."""
    options = parser().parse_args(arguments)
    sizes = sizes_of(options.sizes, options.construction)
    kinds = ["scan", "mixer"] if options.kind == "both" else [options.kind]
    scan_dtype = getattr(torch, options.dtype or "float32")
    options.dtype = options.dtype or "bfloat16"
    run_command(
        "mru",
        options,
        partial(cases, sizes=sizes, kinds=kinds, scan_dtype=scan_dtype),
        partial(small_case, size=sizes[0]) if "mixer" in kinds else None,
        linear=True,
    )
