"""The matrix memory: its Triton and its PyTorch form against the definition, forward and every gradient.

Every buffer that is to be filled starts out as NaN.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import assert_matches, assert_refused, packed, rmse_ratio, run
from nightly import nightly
from torch.nn.functional import pad
from triton_on_cpu import PoisonedTorch, names

from matmix.kernels import matrix_memory
from matmix.kernels.matrix_memory import chunked, fused
from matmix.kernels.matrix_memory.definition import matrix_memory_definition, transitions_definition

DOCUMENTS = [5, 0, 17, 1, 16]
TOKENS = "values", "elements", "keys", "queries"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (fused, chunked):
        monkeypatch.setattr(module, "torch", PoisonedTorch())


def make(seqlen, *, batch=1, heads=3, width=5, order=4, initial=0):
    tokens = batch, seqlen
    inputs = {"values": torch.randn(*tokens, heads, width), "elements": torch.randn(*tokens, heads, order**2) / 3}
    inputs |= {"keys": torch.randn(*tokens, order), "queries": torch.randn(*tokens, order)}
    inputs["rates"] = torch.rand(heads, order)
    return inputs | ({"initial_state": torch.randn(initial, heads, width, order)} if initial else {})


def on(device, backend):
    """The op on `device`, between tensors on the CPU; what belongs to tokens lies in wider rows."""

    def call(**inputs):
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
        moved |= {name: pad(moved[name], (3, 2))[..., 3:-2] for name in TOKENS}
        return tuple(y.cpu() for y in matrix_memory(**moved, return_final_state=True, backend=backend))

    return call


def definition(**inputs):
    return matrix_memory_definition(**inputs, return_final_state=True)


SHAPES = [
    (13, {"batch": 2, "width": 16, "initial": 2}, None),
    (sum(DOCUMENTS), {"initial": 5}, DOCUMENTS),
    (1, {"order": 2, "initial": 1}, None),
    (33, {"heads": 9, "width": 4}, None),
    (17, {"heads": 2, "width": 40, "order": 8}, None),
    nightly(16, {"batch": 3, "width": 1}, None),
    nightly(67, {"heads": 1, "order": 8}, [32, 35]),
    nightly(128, {"heads": 2, "width": 64, "order": 2, "initial": 3}, [64, 0, 64]),
]


@pytest.mark.parametrize(("seqlen", "shape", "documents"), SHAPES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_both_forms_match_the_definition(interpreter, launched, seqlen, shape, documents, backend):
    inputs, options = make(seqlen, **shape), {} if documents is None else {"cu_seqlens": packed(documents)}
    assert_matches(on(interpreter, backend), definition, inputs, **options)
    passes = ["memory_forward_pass", "memory_backward_pass"]
    assert names(launched) == (passes if backend == "triton" else [])


@pytest.mark.parametrize("order", [1, 3, 5])
def test_other_orders_have_the_pytorch_form(interpreter, order):
    assert_matches(on("cpu", "auto"), definition, make(19, order=order, initial=1))
    calls = {"keys of 2, 4 or 8 numbers": lambda: matrix_memory(**make(19, order=order), backend="triton")}
    assert_refused(calls)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("missing", [0, 1])
def test_gradients_of_one_result_alone(interpreter, backend, missing):
    """Of the outputs or of the last states, and what is not there counts as zero."""
    inputs = make(21, initial=1)

    def one(call):
        return lambda **given: call(**given)[missing]

    assert_matches(one(on(interpreter, backend)), one(definition), inputs)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nothing_of_a_document_reaches_another(interpreter, backend):
    """Not even a NaN, forward or backward."""
    bounds, inputs = packed([7, 20, 9]), make(36)
    spoiled = {name: x.clone() for name, x in inputs.items()}
    for name in TOKENS:
        spoiled[name][:, 7:27] = float("nan")
    clean, other = (
        run(on(interpreter, backend), given, torch.float32, cu_seqlens=bounds) for given in (inputs, spoiled)
    )
    for name in ("output 0", *(f"d {name}" for name in TOKENS)):
        for part in (slice(0, 7), slice(27, 36)):
            assert torch.equal(clean[name][:, part], other[name][:, part]), name
    assert torch.equal(clean["output 1"][::2], other["output 1"][::2])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_goes_on_from_its_last_state(interpreter, backend):
    inputs = make(31, batch=2)
    call = on(interpreter, backend)
    y, state = call(**inputs)
    cut = [
        {name: x if name == "rates" else x[:, part] for name, x in inputs.items()}
        for part in (slice(11), slice(11, 31))
    ]
    first, between = call(**cut[0])
    second, last = call(**cut[1], initial_state=between)
    assert rmse_ratio(torch.cat([first, second], 1), y) < 1e-6
    assert rmse_ratio(last, state) < 1e-6


def test_states_grow_by_what_is_added_alone():
    """No row of A has an absolute sum above 1, whatever the elements."""
    turns = transitions_definition(100 * torch.randn(50, 16))
    assert turns.abs().sum(-1).max() <= 1 + 1e-12
    inputs = make(2000) | {"elements": 100 * torch.randn(1, 2000, 3, 16)}
    _, state = on("cpu", "auto")(**inputs)
    written = inputs["values"].abs().sum(1).unsqueeze(-1) * inputs["keys"].abs().amax() * inputs["rates"].amax()
    assert (state.abs().sum(-1, keepdim=True) <= 4 * written).all()


MISTAKES = {
    "values have shape (2, 5)": {"values": torch.zeros(2, 5)},
    "elements has shape (1, 9, 3, 9)": {"elements": torch.zeros(1, 9, 3, 9)},
    "queries has shape (1, 9, 5)": {"queries": torch.zeros(1, 9, 5)},
    "rates has shape (4, 4)": {"rates": torch.zeros(4, 4)},
    "initial_state has shape (2, 3, 5, 4)": {"initial_state": torch.zeros(2, 3, 5, 4)},
}


def test_mistakes_are_named():
    assert_refused({message: partial(matrix_memory, **make(9) | given) for message, given in MISTAKES.items()})
