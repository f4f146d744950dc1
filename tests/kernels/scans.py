"""What the tests of the scans' Triton form share: running it between CPU tensors, and comparing with the definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compare import FLOAT32, rmse_ratio, run
from torch import Tensor

from matmix.kernels import quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.definition import quasiseparable_definition, semiseparable_definition

DEFINITIONS = {
    semiseparable_scan: semiseparable_definition,
    quasiseparable_scan: quasiseparable_definition,
}
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]
"""What most tests run in; test_bfloat16.py does on any machine."""

Layout = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def tolerance(name: str, dtype: torch.dtype, linear: bool) -> float:
    """Largest ratio of root mean squares; `linear`: neither normalised nor a product of directions.

    In bfloat16 the cotangent and the matrices that v, q and k are multiplied with are rounded too, by about 2^-9 each
    time. Gradients of weights are differences of sums of such products, and get twice as much; where the scan is not
    linear the cotangent is first multiplied with rounded outputs, and all get twice as much again.
    (test_bfloat16.py has narrower bounds for cotangents that are exact.)
    """
    if dtype == torch.float32:
        return FLOAT32
    if name.startswith("output"):
        return 5e-3
    return (5e-3 if name == "d v" else 1e-2) * (1 if linear else 2)


def on(device: str, op: Callable, layout: Layout = lambda tensors: tensors, **op_options) -> Callable:
    """The op in Triton on `device`, between tensors that live on the CPU. v, q and k come typed as they are, the
    rest in float32, as a layer has them; `layout` lays them out in memory."""

    def call(*, cu_seqlens: Tensor | None = None, **inputs):
        options = {name: x for name, x in inputs.items() if not torch.is_tensor(x)}
        moved = {name: x.to(device) for name, x in inputs.items() if torch.is_tensor(x)}
        moved = layout({name: x if name[0] in "vqk" else x.float() for name, x in moved.items()})
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens.to(device)
        found = op(**moved, **options, backend="triton", **op_options)
        return tuple(y.cpu() for y in found) if isinstance(found, tuple) else found.cpu()

    return call


def check(
    device: str,
    op: Callable,
    inputs: dict[str, Tensor | None],
    dtype: torch.dtype = torch.float32,
    *,
    layout: Layout = lambda tensors: tensors,
    chunk_size: int | None = None,
    gradients: str = "all",
    **options,
) -> None:
    """Outputs and all gradients agree with the definition, which gets the same rounded inputs in float64.

    gradients: "all", or "none" to look at outputs only: gradients of weights of tokens that see hardly anything but
        themselves are small differences, which bfloat16 does not hold. Neither does it, in any case, what one factor
        for all tokens gets, a sum that may be next to nothing: those are compared in float32 only.
    """
    rounded = {name: x.to(dtype) for name, x in inputs.items() if x is not None}
    absent = {name: None for name, x in inputs.items() if x is None}
    got = run(on(device, op, layout, chunk_size=chunk_size), rounded, dtype, **absent, **options)
    wanted = run(DEFINITIONS[op], rounded, torch.float64, **absent, **options)
    if gradients == "none":
        wanted = {name: x for name, x in wanted.items() if name.startswith("output")}
    if dtype != torch.float32:
        wanted = {name: x for name, x in wanted.items() if x.dim() > 1}
    errors = {name: rmse_ratio(got[name], x) for name, x in wanted.items()}
    linear = not options.get("normalize") and options.get("combine") != "mult"
    wrong = {name: error for name, error in errors.items() if not error <= tolerance(name, dtype, linear)}
    assert not wrong, f"{wrong} for {options}"
