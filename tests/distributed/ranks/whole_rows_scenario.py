"""Mixers of parts of rows, on all ranks of a context, beside the same mixers of whole rows."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from context_scenario import world
from torch import Tensor

from matmix.kernels.context import Context
from matmix.model import ModelConfig, build_model
from matmix.model.mixers import MIXERS
from matmix.model.mixers.base import Mixer

D_MODEL = 24
PART = 6
"""Tokens of a part."""
TWO_ROWS = (0,)
"""In place of boundaries: two rows without any."""


def documents(ranks: int) -> list[tuple[int, ...]]:
    """Boundaries of the documents of a row: over all ranks, on the cuts, off the cuts with one over several ranks and
    some of one token, and two rows that are a document each."""
    last = ranks * PART
    return [
        (0, last),
        tuple(range(0, last + 1, PART)),
        (0, 1, PART - 2, last - PART + 1, last - 2, last - 1, last),
        (0, PART, PART + 1, last),
        TWO_ROWS,
    ]


def of_part(bounds: tuple[int, ...], context: Context) -> Tensor | None:
    """What training gives one rank of them."""
    if bounds == TWO_ROWS:
        return None
    first = context.rank * PART
    there = [(s, e) for s, e in itertools.pairwise(bounds) if s < first + PART and e > first]
    return torch.tensor([there[0][0], *(end for _, end in there)], dtype=torch.int32) - first


def make(name: str, options: dict, causal: bool, dtype: torch.dtype) -> Mixer:
    mixer = MIXERS[name](D_MODEL, MIXERS[name].Config(**options), causal=causal, max_seqlen=32, output_std=0.02)
    generator = torch.Generator().manual_seed(1)
    for parameter in mixer.to(dtype).parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return mixer.eval()


def run(mixer: Mixer, x: Tensor, bounds: Tensor | None, cotangent: Tensor) -> dict[str, Tensor]:
    """The outputs, and the gradients of the inputs and of all parameters."""
    x = x.clone().requires_grad_()
    y = mixer(x, bounds)
    (y * cotangent).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in mixer.named_parameters()}


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference relative to the largest number of the same kind, of all kinds."""
    return torch.stack([(one[name] - other[name]).abs().max() / other[name].abs().max() for name in other]).max().item()


def differences(cases: list[tuple[str, dict, bool]], dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """By case and boundaries, how far results of parts are from those of whole rows in float64; and how far those of
    whole rows are in `dtype`, since norms of what is almost zero enlarge rounding."""
    context, got = world(), {}
    own = slice(context.rank * PART, (context.rank + 1) * PART)
    for name, options, causal in cases:
        for bounds in documents(context.size):
            x, cotangent = torch.randn(2, 2 if bounds == TWO_ROWS else 1, context.size * PART, D_MODEL).to(dtype)
            cu_seqlens = None if bounds == TWO_ROWS else torch.tensor(bounds, dtype=torch.int32)
            exact, *rounded = (
                run(make(name, options, causal, kind), x.to(kind), cu_seqlens, cotangent.to(kind))
                for kind in dict.fromkeys((torch.float64, dtype))
            )
            part = make(name, options, causal, dtype)
            part.context = context
            results = run(part, x[:, own], of_part(bounds, context), cotangent[:, own])
            for one, _ in part.named_parameters():
                dist.all_reduce(results[one])
            at_home = exact | {one: exact[one][:, own] for one in ("y", "x")}
            got[f"{name} {options} {causal} {bounds}"] = (
                far(results, at_home),
                max(far(one, exact) for one in (*rounded, exact)),
            )
    return got


def leaks(cases: list[tuple[str, dict, bool]]) -> list[str]:
    """The cases in which NaN of one document, that begins and ends off the cuts, reaches another one."""
    context, reached = world(), []
    own = slice(context.rank * PART, (context.rank + 1) * PART)
    last = context.size * PART
    bounds = (0, PART - 2, last - PART + 1, last)
    sane = torch.ones(last, dtype=torch.bool)
    sane[bounds[1] : bounds[2]] = False
    for name, options, causal in cases:
        mixer = make(name, options, causal, torch.float64)
        mixer.context = context
        x = torch.randn(1, last, D_MODEL, dtype=torch.float64)
        x[:, ~sane] = torch.nan
        cotangent = torch.where(sane[None, :, None], torch.ones_like(x), torch.nan)
        results = run(mixer, x[:, own], of_part(bounds, context), cotangent[:, own])
        if any(results[one][:, sane[own]].isnan().any() for one in ("y", "x")):
            reached.append(f"{name} {options} {causal}")
    return reached


def models(configs: list[ModelConfig]) -> list[float]:
    """How far the outputs of models are, that are given parts of packed rows, from those that are given whole ones."""
    context, got = world(), []
    own = slice(context.rank * PART, (context.rank + 1) * PART)
    for config in configs:
        model = build_model(config).double().eval()
        for parameter in model.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
        inputs = torch.randint(config.vocab_size, (1, context.size * PART))
        bounds = documents(context.size)[2]
        whole = model(inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))[:, own]
        model.cut_rows(context)
        part = model(inputs[:, own], cu_seqlens=of_part(bounds, context))
        got.append(((part - whole).abs().max() / whole.abs().max()).item())
    return got
