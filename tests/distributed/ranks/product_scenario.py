"""Products of matrices over parts of rows, on all ranks."""

import functools

import torch
import torch.distributed as dist
from context_scenario import world
from mru_inputs import FUSED, mixer_inputs
from parts import part_bounds, part_errors

from matmix.kernels import matrix_product_scan, mru_mixer
from matmix.kernels.context import Context
from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.kernels.mru.definition import mru_mixer_definition

LENGTH = 72
BOUNDS = {
    "rows": None,
    "one": [0, LENGTH],
    "cuts": [0, 18, 24, 36, 48, 54, LENGTH],
    "off": [0, 1, 5, 61, 62, LENGTH],
    "short": [0, 3, 19, 20, 21, 32, 70, 71, LENGTH],
}
"""Documents over three and four ranks, of length 1, that end at cuts or beside them."""


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    whole = x.double()
    dist.all_reduce(whole)
    return whole


def product_errors(context: Context, op, summed, dtype: torch.dtype, nan: bool) -> dict[str, dict[str, float]]:
    """Errors by case; nan: also with documents of "short" NaN that cross one cut or more."""
    errors = {}
    for name, bounds in BOUNDS.items():
        for order in (4, 16):
            torch.manual_seed(1)
            batch, rows = (2, 2) if bounds is None else (1, len(bounds) - 1)
            inputs = {"x": torch.linalg.qr(torch.randn(batch, LENGTH, 2, order, order))[0]}
            if order == 4:
                inputs["initial_state"] = torch.randn(rows, 2, order, order)
            compared = functools.partial(
                part_errors,
                context,
                op,
                matrix_product_definition,
                inputs,
                summed,
                bounds=bounds,
                dtype=dtype,
                all_documents=order == 4,
                return_final_state=True,
            )
            errors[f"{name}, order {order}"] = compared()
            for document in (1, 4, 5) if nan and name == "short" else ():
                errors[f"{name}, order {order}, NaN in {document}"] = compared(spoilt=document)
    return errors


def products(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    errors = {}
    for chunk in (None, 5, 100):
        op = functools.partial(matrix_product_scan, chunk_size=chunk)
        cases = product_errors(world(), op, summed, dtype, chunk is None)
        errors |= {f"{name}, chunks of {chunk}": case for name, case in cases.items()}
    return errors


def mixer_errors(context: Context, op, summed, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Errors by case, over all constructions that have a kernel."""
    errors = {}
    for number, (name, bounds) in enumerate(BOUNDS.items()):
        for construction in FUSED:
            torch.manual_seed(1)
            batch, rows = (2, 2) if bounds is None else (1, len(bounds) - 1)
            chunks, states = number % 2 * 3, rows if number in ((3,) if construction == "affine" else (2, 3, 4)) else 0
            inputs = mixer_inputs(
                LENGTH, construction, batch=batch, heads=2, order=8 if number == 1 else 4, states=states, d_chunk=chunks
            )
            shared = tuple(inputs.keys() & {"w_down", "w_up"})
            errors[f"{name}, {construction}"] = part_errors(
                context, op, mru_mixer_definition, inputs, summed, bounds=bounds, shared=shared, dtype=dtype,
                construction=construction, return_final_state=True,
            )  # fmt: skip
    return errors


def mixers(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    forms = {"parts": mru_mixer, "recomputing": functools.partial(mru_mixer, backend="torch")}
    errors = {}
    for form, op in forms.items():
        errors |= {f"{form}, {name}": case for name, case in mixer_errors(world(), op, summed, dtype).items()}
    for construction in set(CONSTRUCTIONS) - set(FUSED):
        inputs = mixer_inputs(LENGTH, construction, batch=1, heads=2)
        errors[construction] = part_errors(
            world(), mru_mixer, mru_mixer, inputs, summed, bounds=BOUNDS["short"], shared=("w_down",), dtype=dtype,
            construction=construction, return_final_state=True,
        )  # fmt: skip
    return errors


def log_norms() -> list[list[float]]:
    """For each form the largest and the mean log-norm as the ranks see them, and as one does that has the whole row."""
    context, seen = world(), []
    bounds = [0, 30, 190, 191, 384]
    inputs = mixer_inputs(384, "identity_plus", batch=1, heads=2)
    inputs["elements"] *= 4
    length = 384 // context.size
    part = inputs["elements"][:, context.rank * length :][:, :length]
    own = torch.tensor(part_bounds(bounds, context.rank, context.size)[1], dtype=torch.int32)
    options = {"construction": "identity_plus", "return_log_norms": True}
    for backend in ("auto", "torch"):
        options["backend"] = backend
        _, whole = mru_mixer(**inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), **options)
        _, here = mru_mixer(part, inputs["w_down"], cu_seqlens=own, context=context, **options)
        seen += [whole.tolist(), here.tolist()]
    return seen
