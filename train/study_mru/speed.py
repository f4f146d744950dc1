"""Speed: forward and backward of one MRU layer in each form."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.model import initialize
from matmix.model.mixers.mru import MRU, MRUConfig

PLAIN = {"gate": "none", "shift": "none"}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"input": "dense", **PLAIN},
    "chunked": {"input": "chunked", **PLAIN},
    "chunked, gate and shift": {"input": "chunked", "gate": "silu", "shift": "blend"},
}
CASES = {
    f"{construction}, {form}": {"construction": construction, **options}
    for construction in CONSTRUCTIONS
    for form, options in FORMS.items()
}
"""Name -> options of the mixer."""

BATCH, SEQLEN, WIDTH, ORDER = 8, 1024, 384, 8


def speed(cases: dict[str, dict[str, Any]], rounds: int = 5) -> dict[str, dict[str, Any]]:
    """Milliseconds of forward and backward of a layer: medians of `rounds`, in which all cases take turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (torch.randn(BATCH, SEQLEN, WIDTH, generator=generator).to(device) for _ in range(2))
    x.requires_grad_()
    layers = {}
    for name, options in cases.items():
        layer = MRU(WIDTH, MRUConfig(order=ORDER, **options), causal=True, max_seqlen=SEQLEN, output_std=0.02)
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
