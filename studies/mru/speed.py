"""Speed: forward and backward of one MRU layer in each form, beside layers of other mixers."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

from matmix.benchmarks.measure import Clock
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
    layers = {}
    for name, (mixer, options) in CASES.items():
        kind = MIXERS[mixer]
        layer = kind(WIDTH, kind.Config(**options), causal=True, max_seqlen=SEQLEN, output_std=0.02)
        initialize(layer, 0)
        layers[name] = layer.to(device)

    clock = Clock(device)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in layers}
    for turn in range(ROUNDS + 1):
        for name, layer in layers.items():
            forward, y = clock.seconds(functools.partial(layer, x))
            backward, _ = clock.seconds(functools.partial(y.backward, cotangent))
            if turn:  # the first warms up
                taken[name].append((forward, backward, forward + backward))
    found = {}
    for name, times in taken.items():
        medians = [round(1e3 * statistics.median(seconds), 2) for seconds in zip(*times, strict=True)]
        found[name] = dict(zip(("forward_ms", "backward_ms", "together_ms"), medians, strict=True), device=device.type)
    return found
