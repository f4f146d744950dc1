"""Speed: forward and backward of one MRU layer in each form, beside layers of other mixers."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

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


def speed(cases: dict[str, tuple[str, dict[str, Any]]], rounds: int = 5) -> dict[str, dict[str, Any]]:
    """Milliseconds of forward and backward of a layer: medians of `rounds`, in which all cases take turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (torch.randn(BATCH, SEQLEN, WIDTH, generator=generator).to(device) for _ in range(2))
    x.requires_grad_()
    layers = {}
    for name, (mixer, options) in cases.items():
        config = MIXERS[mixer].Config(**options)
        layer = MIXERS[mixer](WIDTH, config, causal=True, max_seqlen=SEQLEN, output_std=0.02)
        initialize(layer, 0)
        layers[name] = layer.to(device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for turn in range(rounds + 1):
        for name, layer in layers.items():
            began = now()
            y = layer(x)
            between = now()
            y.backward(cotangent)
            if turn:  # the first warms up
                taken[name].append((between - began, now() - between))
    found = {}
    for name, times in taken.items():
        forward, backward = (statistics.median(part) for part in zip(*times, strict=True))
        together = statistics.median(sum(pair) for pair in times)
        milliseconds = {"forward_ms": forward, "backward_ms": backward, "together_ms": together}
        found[name] = {**{key: round(value, 2) for key, value in milliseconds.items()}, "device": device.type}
    return found
