"""Mixers of parts of rows, on all ranks of a context, and of whole rows on one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_mixer import language_model_of_all
from mixer_cases import CASES as REGISTERED
from mixer_cases import D_MODEL, Case, small_config
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from matmix.kernels.context import Context
from matmix.model import build_model, initialize
from matmix.model.carrying import CarriedRows
from matmix.model.mixers import MIXERS
from matmix.train.activation import checkpoint_activations, compile_blocks

SEQLEN = 48
"""Cut by 2, 3 and 4 ranks."""
DOCUMENTS = {
    "two rows": None,
    "one document": [48],
    "at cuts": [12, 4, 8, 8, 4, 12],
    "over three ranks": [5, 38, 5],
    "single tokens": [1, 10, 1, 1, 2, 1, 9, 22, 1],
}
OPTIONS = {
    "hydra-learned-states": ("hydra", {"learnable_init_states": True}),
    "hydra-recomputed": ("hydra", {"recompute": True, "chunk_size": 16}),
    "lion_s-chunked": ("lion_s", {"form": "chunked", "feature_map": "elu"}),
    "semiseparable-norm-first": ("semiseparable", {"norm_before_gate": True, "ngroups": 2}),
    "attention-one-head": ("attention", {"nheads": 1, "value_headdim": 4}),
    "attention-one-head-causal": ("attention", {"nheads": 1}),
    "attention-five-heads-causal": ("attention", {"nheads": 5, "headdim": 4}),
}
"""What M and f(x) do not show: in mixer_cases.VARIANTS stand only mixers that are M f(x)."""
CASES = REGISTERED | {
    name: Case(mixer, small_config(mixer, **options), mixer == "semiseparable" or name.endswith("-causal"), "O(L)")
    for name, (mixer, options) in OPTIONS.items()
}
COLLECTIVES = {
    "all_gather_into_tensor": 1, "all_to_all_single": 1, "reduce_scatter_tensor": 1, "all_reduce": 0,
    "batch_isend_irecv": 0,
}  # fmt: skip
"""What operations of parts call of torch.distributed, and which of its arguments is what they send."""
Results = dict[str, Tensor]
"""The outputs "y", and by name the gradients of the inputs "x" and of all parameters."""


def run(name: str, documents: str, dtype: torch.dtype, context: Context | None) -> Results:
    """What one of CASES makes of whole rows, or of this rank's part of them."""
    mixer = CASES[name].build(max_seqlen=SEQLEN).to(dtype)
    draw = torch.Generator().manual_seed(1)
    for key, parameter in mixer.named_parameters():
        parameter.data = (0.3 * torch.randn(parameter.shape, generator=draw) + ("norm" in key)).to(dtype)
    mixer.context = context
    lengths = DOCUMENTS[documents]
    bounds = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x, dy = torch.randn(2, 2 if lengths is None else 1, SEQLEN, D_MODEL, generator=draw).to(dtype)
    if context is not None:
        x, dy = (part.chunk(context.size, 1)[context.rank] for part in (x, dy))
        bounds = None if bounds is None else bounds_of_part(bounds, x.shape[1], context.rank)
    x = x.clone().requires_grad_()
    y = mixer(x, bounds, max(lengths or [SEQLEN]))
    (y * dy).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {key: p.grad for key, p in mixer.named_parameters()}


def carried(changed: str, parts: bool = True) -> dict[str, list[Tensor]]:
    """What a model of all mixers that carry states makes of three lanes of rows of 16 tokens, five rows each, or of
    this rank's parts of them: the outputs of each step, the gradients of their squares, and the states behind it. In
    the last step NaN enters the first lane. changed: "compiled" or a kind of checkpointing."""
    layers = tuple(name for name, mixer in MIXERS.items() if mixer.carries)
    if changed == "compiled":  # delta rules read boundaries on the host
        layers = ("retnet", "semiseparable")
    model = build_model(dataclasses.replace(language_model_of_all(), layers=layers, n_layers=len(layers)))
    initialize(model, seed=0)
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    model.double()
    context = Context.of(dist.group.WORLD) if parts else None
    if context is not None:
        model.cut_rows(context)
    if changed == "compiled":
        compile_blocks(model, backend="aot_eager", fullgraph=True)
    elif changed:
        checkpoint_activations(model, changed)
    ids, begins = torch.randint(29, (3, 80), generator=draw), torch.zeros(3, 80, dtype=torch.bool)
    begins[[0, 0, 0, 0, 0, 0, 2, 2, 2], [20, 21, 39, 48, 60, 77, 16, 17, 63]] = True  # the second lane is one document
    rows, found = CarriedRows(), {"y": [], "gradients": [], "states": []}
    for inputs, starts in zip(ids.split(16, 1), begins.split(16, 1), strict=True):
        if len(found["y"]) == 4:
            tree_map_only(torch.is_floating_point, lambda state: state[0].fill_(torch.nan), rows.states)
        rows.continues = ~starts[:, 0]
        edges = starts.flatten() | (torch.arange(48) % 16 == 0)
        bounds = torch.cat([edges.nonzero().squeeze(1), torch.tensor([48])]).to(torch.int32)
        if context is not None:
            inputs = inputs.reshape(1, 48).chunk(context.size, 1)[context.rank]
            bounds = bounds_of_part(bounds, inputs.shape[1], context.rank)
        y = model(inputs, cu_seqlens=bounds, carried=rows)
        found["y"].append(y.detach().flatten(0, 1))
        gradients = torch.autograd.grad(y.square().sum(), [*model.parameters()], allow_unused=True)
        found["gradients"].append(torch.cat([one.flatten() for one in gradients if one is not None]))
        found["states"] += [state.clone() for state in tree_leaves(rows.states)]
    return found


def compiled(names: list[str]) -> list[str]:
    """The mixers whose outputs or gradients of inputs are other numbers when they are compiled as one graph."""
    context, other = Context.of(dist.group.WORLD), []
    for name in names:
        mixer, results = CASES[name].build(max_seqlen=SEQLEN), []
        mixer.context = context
        x = torch.randn(1, SEQLEN, D_MODEL).chunk(context.size, 1)[context.rank].clone().requires_grad_()
        bounds = bounds_of_part(torch.tensor([0, 5, 43, 48], dtype=torch.int32), x.shape[1], context.rank)
        torch._dynamo.reset()
        for call in (mixer.__call__, torch.compile(mixer.__call__, backend="aot_eager", fullgraph=True)):
            y = call(x, bounds, 43)
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
        if not all(torch.equal(one, another) for one, another in zip(*results, strict=True)):
            other.append(name)
    return other


def bounds_of_part(bounds: Tensor, seqlen: int, rank: int) -> Tensor:
    """The boundaries of the documents that have tokens in the part of a rank, relative to it."""
    bounds = bounds - rank * seqlen
    return bounds[(bounds > 0).int().argmax() - 1 : (bounds < seqlen).sum() + 1]


def run_parts(cases: list[tuple[str, str]], dtype: torch.dtype) -> list[Results]:
    """`run` of each mixer and kind of documents on this rank."""
    context = Context.of(dist.group.WORLD)
    return [run(name, documents, dtype, context) for name, documents in cases]


def bytes_sent(names: list[str], lengths: list[int]) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """For mixers and lengths of whole rows, the collectives of a forward and a backward pass, and the bytes in what
    this rank gives to each."""
    context, sent = Context.of(dist.group.WORLD), {}
    calls: list[tuple[str, int]] = []

    def counted(name: str, at: int) -> Callable:
        call = getattr(dist, name)

        def count(*arguments: Any, **options: Any) -> Any:
            what = arguments[at]
            tensors = [one.tensor for one in what if one.op is dist.isend] if name == "batch_isend_irecv" else [what]
            calls.append((name, sum(tensor.nbytes for tensor in tensors)))
            return call(*arguments, **options)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name, at in COLLECTIVES.items():
            patch.setattr(dist, name, counted(name, at))
        for name, seqlen in itertools.product(names, lengths):
            mixer = CASES[name].build()
            mixer.context = context
            calls.clear()
            x = torch.randn(1, seqlen // context.size, D_MODEL, requires_grad=True)
            mixer(x).sum().backward()
            sent[name, seqlen] = list(calls)
    return sent
