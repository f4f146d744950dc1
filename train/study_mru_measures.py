"""What the study of MRU constructions measures without training: norms along many tokens, and speed."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.loader import build_loader
from matmix.kernels.mru.norms import log_norms
from matmix.model import build_model, initialize
from matmix.model.config import ModelConfig
from matmix.model.interop.plain_config import model_config_from_dict
from matmix.model.mixers.mru import MRU, MRUConfig

LENGTH = 8192
"""Tokens along which norms are followed."""

STDS = (0.0, 0.02, 0.1)
"""Standard deviations of the weights that elements come from; they start at 0 and grow in the first steps."""

ORDER = 8


EVERY_64 = tuple(range(64, LENGTH + 1, 64))
"""Tokens, counted from 1, at which the states of trained models are looked at."""

FROM_1 = tuple(sorted({round(2 ** (i / 8)) for i in range(8 * LENGTH.bit_length() - 7)}))
"""The same for random tokens, where growth may take 10 tokens or 10,000: eight an octave."""


def curve(states: Tensor, tokens: tuple[int, ...]) -> dict[str, list[float | None]]:
    """Largest and mean log-norm over rows and heads at these tokens of (B, L, H, o, o); None after an overflow."""
    norms = log_norms(states[:, torch.tensor(tokens) - 1]).transpose(0, 1).flatten(1)
    there = norms.isfinite().all(1).tolist()
    largest, mean = norms.amax(1).tolist(), norms.mean(1).tolist()
    return {
        "largest": [round(value, 3) if ok else None for value, ok in zip(largest, there, strict=True)],
        "mean": [round(value, 3) if ok else None for value, ok in zip(mean, there, strict=True)],
    }


def overflow(states: Tensor) -> int | None:
    """The first token, counted from 1, at which a state (B, L, H, o, o) is not finite."""
    bad = ~states.isfinite().all(-1).all(-1).all(-1).all(0)
    return int(bad.int().argmax()) + 1 if bad.any() else None


@torch.no_grad()
def growth(options: dict[str, Any]) -> dict[str, Any]:
    """Norms along normal inputs, two rows of them, for weights of several sizes; the quickstart's width."""
    layer = MRU(192, MRUConfig(order=ORDER, **options), causal=True, max_seqlen=LENGTH, output_std=0.02)
    initialize(layer, 0)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(layer.in_proj.weight.shape, generator=generator)
    x = torch.randn(2, LENGTH, 192, generator=generator)
    found = {}
    for std in STDS:
        layer.in_proj.weight.copy_(direction * std)
        states, _ = layer.mixed(layer.elements(x))
        found[f"{std:g}"] = {**curve(states, FROM_1), "overflow": overflow(states)}
    return found


@torch.no_grad()
def beyond(weights: Path, data: str) -> dict[str, Any]:
    """Norms in every layer of a trained model along 8,192 tokens of one document, and the loss there."""
    saved = torch.load(weights, weights_only=True)
    config: ModelConfig = model_config_from_dict(saved["model"])
    model = build_model(config)
    model.load_state_dict(saved["state"])
    model.eval()
    ids = document(data)
    curves: list[dict[str, Any]] = []

    def look(mixer: MRU, inputs: tuple[Tensor, ...]) -> None:
        states, _ = mixer.mixed(mixer.elements(inputs[0]))
        curves.append({**curve(states, EVERY_64), "overflow": overflow(states)})

    for module in model.modules():
        if isinstance(module, MRU):
            module.register_forward_pre_hook(look)
    losses = torch.nn.functional.cross_entropy(model(ids[:, :-1]).squeeze(0).float(), ids[0, 1:], reduction="none")
    # Up to the length of training, and the last quarter.
    spans = {"first_128": losses[:128], "last_2048": losses[-2048:], "all": losses}
    means = {name: float(span.mean()) for name, span in spans.items()}
    return {"layers": curves, "loss": {name: mean if mean == mean else None for name, mean in means.items()}}


def document(data: str) -> Tensor:
    """The first 8,193 tokens of the training split as they stand, (1, 8193) int64; one play goes on for longer."""
    config = DataConfig(path=data, seqlen=LENGTH + 1, shuffle=False, workers=0, prefix="bos")
    loader = build_loader(
        config, split="train", global_batch_size=1, micro_batch_size=1, rank=0, world_size=1, seed=0, masking=None,
        one_pass=False, tokenizer_sha256=None,
    )  # fmt: skip
    return next(iter(loader)).input_ids


def speed(variants: dict[str, dict[str, Any]], rounds: int = 9) -> dict[str, dict[str, Any]]:
    """Milliseconds of forward and backward of a layer (batch 8, 1,024 tokens, width 384, order 8), in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (torch.randn(8, 1024, 384, generator=generator).to(device) for _ in range(2))
    x.requires_grad_()
    layers = {}
    for name, options in variants.items():
        layer = MRU(384, MRUConfig(order=ORDER, **options), causal=True, max_seqlen=1024, output_std=0.02)
        initialize(layer, 0)
        torch.nn.init.normal_(layer.in_proj.weight, std=0.002, generator=generator)  # no product overflows
        layers[name] = layer.to(device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    def once(layer: MRU) -> tuple[float, float]:
        began = now()
        y = layer(x)
        between = now()
        y.backward(cotangent)
        return between - began, now() - between

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for turn in range(rounds + 1):
        for name, layer in layers.items():
            times = once(layer)
            if turn:  # the first warms up
                taken[name].append(times)
    found = {}
    for name, times in taken.items():
        forward, backward = (statistics.median(part) for part in zip(*times, strict=True))
        together = statistics.median(sum(pair) for pair in times)
        found[name] = {"forward_ms": forward, "backward_ms": backward, "together_ms": together, "device": device.type}
    return found
