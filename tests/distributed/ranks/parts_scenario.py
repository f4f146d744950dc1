"""Operations over rows that several ranks hold parts of, compared with whole rows on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import triton_on_cpu
from harness import run_distributed
from torch import Tensor

from matmix import kernels
from matmix.kernels.context import Context


class Case(NamedTuple):
    """A call of an operation, for whole rows."""

    name: str | Callable
    """Of an operation of `kernels`; or a function of a module."""
    inputs: dict[str, Tensor]
    """The first is (batch, seqlen, ...), and others with as many tokens are cut too."""
    cu_seqlens: Tensor | None
    options: dict[str, Any]
    wanted: Callable
    """Computes it on one rank, of inputs and cu_seqlens."""


def of_documents(bounds: list[int] | None) -> tuple[int, int, Tensor | None]:
    """The number of rows, that of states, and the boundaries; None = two rows."""
    return (2, 2, None) if bounds is None else (1, len(bounds) - 1, torch.tensor(bounds, dtype=torch.int32))


def check_parts(
    cases: dict[str, Case],
    ranks: int,
    tolerance: float,
    *,
    interpreted: bool = False,
    run: Callable[[list[tuple]], list] | None = None,
) -> None:
    """Outputs and gradients of all ranks together are those of whole rows, to `tolerance` times the largest of each.
    interpreted: the ranks run Triton's kernels. run: in place of processes, gives what `run_parts` returned on each."""
    calls, whole = [], {}
    for label, case in cases.items():
        leaves = {key: x.clone().requires_grad_() for key, x in case.inputs.items()}
        outputs = case.wanted(**leaves, cu_seqlens=case.cu_seqlens)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        cotangents = [torch.randn(y.shape, dtype=y.dtype) for y in outputs]
        sum((y * cotangent).sum() for y, cotangent in zip(outputs, cotangents, strict=True)).backward()
        whole[label] = [y.detach() for y in outputs], {key: x.grad for key, x in leaves.items()}
        calls.append((case.name, case.inputs, cotangents, case.cu_seqlens, case.options))
    if run is not None:
        parts = run(calls)
    else:
        on_rank = run_interpreted_parts if interpreted else run_parts
        patience = 1500 if interpreted else 300  # a hundred cases in the interpreter take minutes
        parts = run_distributed(on_rank, ranks, arguments=(calls,), interpreted=interpreted, timeout=patience)
    errors = {}
    for at, (label, (outputs, gradients)) in enumerate(whole.items()):
        for number, wanted in enumerate(outputs):
            errors[f"{label}: output {number}"] = error([rank[at][0][number] for rank in parts], wanted)
        for key, wanted in gradients.items():
            if wanted is not None:
                errors[f"{label}: d {key}"] = error([rank[at][1][key] for rank in parts], wanted)
    wrong = {what: size for what, size in errors.items() if not size <= tolerance}
    assert not wrong, f"on {ranks} ranks: {wrong}"


def error(parts: list[Tensor], wanted: Tensor) -> float:
    """The largest difference over the largest wanted value. Parts of tokens are put together; of what is the same on
    all ranks, such as the gradient of a parameter, each rank has its contribution."""
    got = sum(parts) if parts[0].shape == wanted.shape else torch.cat(parts, 1)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300)).item()


def part_of(x: Tensor, seqlen: int, context: Context) -> Tensor:
    """This rank's tokens of x (batch, seqlen, ...); what has no tokens as it is."""
    return x.chunk(context.size, 1)[context.rank] if x.dim() > 2 and x.shape[1] == seqlen else x


def run_part(
    context: Context,
    name: str | Callable,
    inputs: dict[str, Tensor],
    cotangents: list[Tensor],
    cu_seqlens: Tensor | None,
    options: dict[str, Any],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's outputs and gradients. Everything is given for whole rows."""
    op = getattr(kernels, name) if isinstance(name, str) else name
    seqlen = next(iter(inputs.values())).shape[1]
    leaves = {key: part_of(x, seqlen, context).clone().requires_grad_() for key, x in inputs.items()}
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens - context.rank * (seqlen // context.size)
    outputs = op(**leaves, cu_seqlens=cu_seqlens, context=context, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = zip(outputs, cotangents, strict=True)
    sum((y * part_of(cotangent, seqlen, context)).sum() for y, cotangent in pairs).backward()
    gradients = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()}
    return [y.detach() for y in outputs], gradients


def run_parts(cases: list[tuple]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """`run_part` of each case."""
    context = Context.of(dist.group.WORLD)
    return [run_part(context, *case) for case in cases]


def run_interpreted_parts(cases: list[tuple]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """The same by Triton's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        triton_on_cpu.interpret(patch)
        return run_parts([(*case, options | {"backend": "triton"}) for *case, options in cases])
