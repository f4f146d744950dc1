"""Comparing an op with its float64 definition: outputs and every gradient, as ratios of root mean squares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FLOAT32 = 5e-5
"""Largest ratio of root mean squares in float32: some hundred roundings of 2^-24 in a row, of terms that partly cancel
(1e-6 to 4e-6 over 1000 tokens); what is left out or taken twice, or rounded to fewer bits, is off by 1e-3 and more.
"""


def rmse_ratio(got: Tensor, wanted: Tensor) -> float:
    """Root mean square of the error over that of the wanted values."""
    got, wanted = got.detach().double(), wanted.detach().double()
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    error = (got - wanted).pow(2).mean().sqrt()
    return (error / wanted.pow(2).mean().sqrt().clamp(min=1e-300)).item() if error > 0 else float(error)


def run(op: Callable, inputs: dict[str, Tensor | None], dtype: torch.dtype, **options) -> dict[str, Tensor]:
    """Outputs of `op` and gradients of all its inputs for one fixed random cotangent, by name; it changes neither
    inputs nor cotangents."""
    leaves = {name: None if x is None else x.detach().to(dtype).clone().requires_grad_() for name, x in inputs.items()}
    outputs = op(**leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(y.shape, generator=draw).to(y.dtype) for y in outputs]
    given = [*cotangents, *(x for x in leaves.values() if x is not None)]
    before = [x.detach().clone() for x in given]
    torch.autograd.backward(outputs, cotangents)
    assert all(torch.equal(x.nan_to_num(), kept.nan_to_num()) for x, kept in zip(given, before, strict=True))
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    found |= {f"d {name}": x.grad for name, x in leaves.items() if x is not None}
    # An input that nothing depends on (a decay of a single token) may be left without a gradient by autograd.
    return {name: torch.zeros_like(leaves[name[2:]]) if value is None else value for name, value in found.items()}


def assert_matches(
    op: Callable,
    definition: Callable,
    inputs: dict[str, Tensor | None],
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float = FLOAT32,
    op_options: dict | None = None,
    **options,
) -> None:
    """The op in `dtype` agrees with the definition on the same (rounded) inputs in float64."""
    rounded = {name: None if x is None else x.to(dtype) for name, x in inputs.items()}
    got = run(op, rounded, dtype, **options, **(op_options or {}))
    wanted = run(definition, rounded, torch.float64, **options)
    errors = {name: rmse_ratio(got[name], wanted[name]) for name in wanted}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"{wrong} for {options}"


def assert_refused(calls: dict[str, Callable]) -> None:
    """Each call raises a ValueError of one line that contains the text it is listed under."""
    wrong = {}
    for message, call in calls.items():
        try:
            call()
        except ValueError as error:
            if message not in str(error) or "\n" in str(error):
                wrong[message] = str(error)
        else:
            wrong[message] = "no error"
    assert not wrong, wrong


def on_triton(op: Callable, device: str) -> Callable:
    """`op` by its Triton form on `device`, from and to tensors on the CPU, arguments by name."""

    def call(**inputs):
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
        outputs = op(**moved, backend="triton")
        return tuple(y.cpu() for y in outputs) if isinstance(outputs, tuple) else outputs.cpu()

    return call


def assert_bit_equal_twice(op: Callable, inputs: dict[str, Tensor | None], **options) -> None:
    """Outputs and gradients in float32 are the same to the last bit when computed again."""
    first, second = (run(op, inputs, torch.float32, **options) for _ in range(2))
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{different} for {options}"


def packed(lengths: list[int]) -> Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
