"""Mixers that get whole rows of some heads from the other ranks: what reaches whom, and what is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from context_scenario import world
from mixer_parts_scenario import CASES, D_MODEL, SEQLEN, bounds_of_part

from matmix.model import ModelConfig, build_model

BOUNDS = torch.tensor([0, 5, 43, SEQLEN], dtype=torch.int32)
"""Of three documents, of which one lies over all ranks."""


def leaks(names: list[str]) -> list[str]:
    """The cases in which NaN of the document over all ranks, and of its gradient, reaches another document."""
    context, reached = world(), []
    sane = (torch.arange(SEQLEN) < 5) | (torch.arange(SEQLEN) >= 43)
    here = sane.chunk(context.size)[context.rank]
    for name in names:
        mixer = CASES[name].build(max_seqlen=SEQLEN).double()
        mixer.context = context
        x = torch.randn(1, len(here), D_MODEL, dtype=torch.float64).masked_fill(~here[:, None], torch.nan)
        y = mixer(x.requires_grad_(), bounds_of_part(BOUNDS, len(here), context.rank))
        gradient = torch.ones_like(y).masked_fill(~here[:, None], torch.nan)
        (dx,) = torch.autograd.grad(y, x, gradient)
        if any(one[:, here].isnan().any() for one in (y, dx)):
            reached.append(name)
    return reached


def numbers_from_others(names: list[str]) -> list[int]:
    """How many numbers this rank receives from the others in the forward pass of each case."""
    context, received, counts = world(), [], []
    exchange, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def count_exchange(output, given, coming, going, **options):
        received.append(output.numel() - coming[context.rank])
        return exchange(output, given, coming, going, **options)

    def count_gather(output, given, **options):
        received.append((output.numel() - given.numel()) * given.is_floating_point())
        return gather(output, given, **options)

    dist.all_to_all_single, dist.all_gather_into_tensor = count_exchange, count_gather
    try:
        for name in names:
            mixer = CASES[name].build(max_seqlen=SEQLEN)
            mixer.context = context
            tokens = SEQLEN // context.size
            mixer(torch.randn(1, tokens, D_MODEL), bounds_of_part(BOUNDS, tokens, context.rank))
            counts.append(sum(received))
            received.clear()
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = exchange, gather
    return counts


def kept(names: list[str], seqlen: int) -> dict[str, float]:
    """By case, the bytes that are kept for the backward pass of a part, over those of the whole row."""
    context, shares = world(), {}
    for name in names:
        counts = []
        for ranks in (None, context):
            mixer = CASES[name].build(max_seqlen=seqlen)
            mixer.context, tokens = ranks, seqlen if ranks is None else seqlen // ranks.size
            bounds = torch.tensor([0, seqlen // 5, seqlen], dtype=torch.int32)
            bounds = bounds if ranks is None else bounds_of_part(bounds, tokens, ranks.rank)
            own, sizes = {parameter.untyped_storage().data_ptr() for parameter in mixer.parameters()}, {}

            def note(x, sizes=sizes):
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                mixer(torch.randn(1, tokens, D_MODEL, requires_grad=True), bounds)
            counts.append(sum(size for at, (size, _) in sizes.items() if at not in own))
        shares[name] = counts[1] / counts[0]
    return shares


def models(configs: list[ModelConfig]) -> list[float]:
    """How far the outputs of models are, that are given parts of packed rows, from those that are given whole ones."""
    context, got = world(), []
    for config in configs:
        model = build_model(config).double().eval()
        for parameter in model.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
        inputs = torch.randint(config.vocab_size, (1, SEQLEN))
        part = inputs.chunk(context.size, 1)[context.rank]
        whole = model(inputs, cu_seqlens=BOUNDS).chunk(context.size, 1)[context.rank]
        model.cut_rows(context)
        outputs = model(part, cu_seqlens=bounds_of_part(BOUNDS, part.shape[1], context.rank))
        got.append(((outputs - whole).abs().max() / whole.abs().max()).item())
    return got
