"""Operations on parts of rows, compared with their definitions on whole rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matmix.kernels.context import Context


def part_bounds(bounds: list[int], rank: int, size: int) -> tuple[list[int], list[int]]:
    """The documents that rank holds tokens of, and their boundaries from the part's first token on."""
    length = bounds[-1] // size
    begin, end = rank * length, (rank + 1) * length
    here = [d for d in range(len(bounds) - 1) if bounds[d] < end and bounds[d + 1] > begin]
    return here, [bounds[d] - begin for d in [*here, here[-1] + 1]]


def part_errors(
    context: Context,
    op: Callable,
    definition: Callable,
    inputs: dict[str, Tensor],
    summed: Callable[[Tensor], Tensor],
    *,
    bounds: list[int] | None = None,
    shared: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
    spoilt: int | None = None,
    all_documents: bool = False,
    **options,
) -> dict[str, float]:
    """The largest errors of this rank's outputs and gradients by `op`, relative to the largest value of the
    definition's on whole rows in float64.

    inputs: tokens along dimension 1; those named in `shared` belong to all ranks; `initial_state` has a row for every
    row or document. Both functions take them by name and give outputs and final states, `op` in a context. summed: adds
    the gradients of all ranks. spoilt: a document whose tokens are NaN on the ranks, where nothing of it is compared.
    all_documents: each rank is given the boundaries of all, also of those that it has no tokens of.
    """
    rank, size, length = context.rank, context.size, next(iter(inputs.values())).shape[1]
    tokens = slice(rank * length // size, (rank + 1) * length // size)
    here, own = ([], None) if bounds is None else part_bounds(bounds, rank, size)
    if all_documents and bounds is not None:
        here, own = list(range(len(bounds) - 1)), [bound - tokens.start for bound in bounds]

    def packed(places: list[int] | None) -> Tensor | None:
        return None if places is None else torch.tensor(places, dtype=torch.int32)

    def cut(name: str, x: Tensor) -> Tensor:
        if name in shared:
            return x
        if name == "initial_state":
            return x if bounds is None else x[here]
        return x[:, tokens]

    whole = {name: x.double().requires_grad_() for name, x in inputs.items()}
    wanted = definition(**whole, cu_seqlens=packed(bounds), **options)
    draw = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=draw, dtype=torch.float64) for y in wanted]
    given = {name: x.detach().clone() for name, x in inputs.items()}
    clean = torch.ones(length, dtype=torch.bool)
    if spoilt is not None:
        clean[bounds[spoilt] : bounds[spoilt + 1]] = False
        cotangents[0][:, ~clean], cotangents[1][spoilt] = 0, 0
        for name in given.keys() - {"initial_state", *shared}:
            given[name][:, ~clean] = torch.nan
    torch.autograd.backward(wanted, cotangents)
    parts = {name: cut(name, x).to(dtype).clone().requires_grad_() for name, x in given.items()}
    y, final = op(**parts, cu_seqlens=packed(own), context=context, **options)
    if bounds is None:
        ends = [rank == size - 1] * len(final)
        begins, rows = [rank == 0] * len(final), range(len(final))
    else:
        rows = here
        ends = [tokens.start < bounds[d + 1] <= tokens.stop for d in here]
        begins = [tokens.start <= bounds[d] < tokens.stop for d in here]
    sure = [d != spoilt for d in rows]
    ends, begins = (torch.tensor(there).view(-1, *[1] * (final.dim() - 1)) for there in (ends, begins))
    of_row = wanted[1][rows] * ends
    dfinal = cotangents[1][rows]
    torch.autograd.backward((y, final), (cotangents[0][:, tokens].to(dtype), dfinal.to(dtype)))
    pairs = {"y": (y, wanted[0][:, tokens], wanted[0]), "final": (final[sure], of_row[sure], wanted[1])}
    for name, x in parts.items():
        got, of_all = x.grad, whole[name].grad
        if name == "initial_state":
            expected = of_all[rows] * begins
        else:
            got, expected = (summed(got), of_all) if name in shared else (got, of_all[:, tokens])
        pairs[f"d {name}"] = got, expected, of_all
    errors = {}
    for name, (got, expected, of_all) in pairs.items():
        if spoilt is not None and name in {f"d {one}" for one in ("initial_state", *shared)}:
            continue
        if spoilt is not None and name != "final":
            got, expected = got[:, clean[tokens]], expected[:, clean[tokens]]
        error = (got.double() - expected).abs().max() if got.numel() else torch.zeros(())
        errors[name] = float(error.detach() / of_all.detach().nan_to_num().abs().max().clamp(min=1e-300))
    return errors
