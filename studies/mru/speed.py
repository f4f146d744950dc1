"""Speed: forward and backward of one MRU layer in each form, beside layers of other mixers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from matmix.benchmarks.measure import Candidate, Clock, Speed, both_passes
from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.model import initialize
from matmix.model.mixers import MIXERS

PLAIN = {"gate": "none", "shift": "none"}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"input": "dense", **PLAIN},
    "chunked": {"input": "chunked", **PLAIN},
    "chunked, gate and shift": {"input": "chunked", "gate": "silu", "shift": "blend"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{construction}, {form}": ("mru", {"construction": construction, "order": 8, **options})
        for construction in CONSTRUCTIONS
        for form, options in FORMS.items()
    },
    "attention": ("attention", {"headdim": 64}),
    "SSD": ("semiseparable", {"headdim": 64, "d_state": 64}),
    "gated delta rule": ("gated_delta", {"headdim": 64, "qk_dim": 64}),
    "convolution only": ("convolution", {}),
}
"""Name -> mixer and its options."""

BATCH, SEQLEN, WIDTH = 4, 1024, 384
ROUNDS = 5


def speed() -> dict[str, dict[str, Any]]:
    """Milliseconds of forward and backward of each layer: medians of `ROUNDS`, in which all take turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (torch.randn(BATCH, SEQLEN, WIDTH, generator=generator).to(device) for _ in range(2))
    x.requires_grad_()
    candidates = []
    for name, (mixer, options) in CASES.items():
        kind = MIXERS[mixer]
        layer = kind(WIDTH, kind.Config(**options), causal=True, max_seqlen=SEQLEN, output_std=0.02)
        initialize(layer, 0)
        leaves = [x, *layer.to(device).parameters()]
        candidates.append(Candidate(name=name, run=functools.partial(layer, x), leaves=leaves, cotangent=cotangent))
        both_passes(candidates[-1])  # warms up
    Speed(rounds=ROUNDS).take_turns(candidates, Clock(device))
    parts = {"forward_ms": "forward", "backward_ms": "backward", "together_ms": "both"}
    return {
        one.name: {key: round(1e3 * one.record["seconds"][part]["median"], 2) for key, part in parts.items()}
        | {"device": device.type}
        for one in candidates
    }
