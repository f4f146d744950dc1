"""The causal short convolution from a state to a state: Triton, PyTorch and the definition, with all gradients.

In Triton's interpreter without a GPU. Outputs that the kernels are to fill start out as NaN.
"""

from __future__ import annotations

import functools

import pytest
import torch
from compare import FLOAT32, rmse_ratio
from nightly import each_value_once
from triton_on_cpu import PoisonedTorch

from matmix.kernels import short_conv
from matmix.kernels.launching import record_launches
from matmix.kernels.short_conv import fused
from matmix.kernels.short_conv.chunked import short_conv_torch
from matmix.kernels.short_conv.definition import short_conv_definition

BACKENDS = ("torch", "triton")
STATES = {"both": (True, True), "given": (True, False), "returned": (False, True)}
"""Whether an initial state is given, and the final one is asked for."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    monkeypatch.setattr(fused, "torch", PoisonedTorch())


def inputs_of(seqlen, width, *, batch=2, d=5, bias=True, given=True):
    inputs = {"x": torch.randn(batch, seqlen, d), "weight": torch.randn(d, width)}
    inputs |= {"bias": torch.randn(d)} if bias else {}
    return inputs | ({"initial_state": torch.randn(batch, d, width - 1)} if given else {})


def results(op, inputs, *, dtype=None, device="cpu", layout=lambda x: x, **options):
    """Outputs, then the gradients of all inputs, of a loss that depends on both outputs."""
    leaves = {name: x.to(device, dtype or x.dtype, copy=True).requires_grad_() for name, x in inputs.items()}
    given = leaves | {"x": layout(leaves["x"])}
    y = op(**given, causal=True, **options)
    outputs = y if isinstance(y, tuple) else (y,)
    loss = sum((x * x.detach().cos()).sum() for x in outputs)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    names = [*("y", "final state")[: len(outputs)], *(f"d {name}" for name in inputs)]
    return {name: x.detach() for name, x in zip(names, (*outputs, *gradients), strict=True)}


def check(device, inputs, tolerance=FLOAT32, layout=lambda x: x, **options):
    wanted = results(short_conv_definition, inputs, dtype=torch.float64, **options)
    forms = {name: functools.partial(short_conv, backend=name) for name in BACKENDS} | {"exported": short_conv_torch}
    for name, form in forms.items():
        place = device if name == "triton" else "cpu"
        found = results(form, inputs, device=place, layout=layout, **options)
        assert list(found) == list(wanted)
        for what, x in found.items():
            source = inputs.get(what.removeprefix("d "), inputs["x"])
            assert x.dtype == (inputs.get("initial_state", source).dtype if what == "final state" else source.dtype)
            assert rmse_ratio(x.cpu(), wanted[what]) <= tolerance, (name, what)


@pytest.mark.parametrize(
    ("states", "seqlen", "width"), each_value_once(list(STATES), [1, 2, 3, 4, 7, 8, 9, 31, 67, 131], [9, 4, 2, 9])
)
def test_any_length(interpreter, states, seqlen, width):
    """Sequences may have fewer tokens than the state holds."""
    given, returned = STATES[states]
    inputs = inputs_of(seqlen, width, given=given)
    check(interpreter, inputs, activation="silu", return_final_state=returned)


@pytest.mark.parametrize(
    ("width", "bias", "activation"), each_value_once(range(2, 10), [False, True, True], ["silu", None])
)
def test_any_width(interpreter, width, bias, activation):
    inputs = inputs_of(21, width, batch=3, bias=bias)
    check(interpreter, inputs, activation=activation, return_final_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("config", fused.configurations())
def test_every_configuration(interpreter, config):
    with fused.force_configuration(config):
        for seqlen, d in ((config.span + 1, config.channels + 12), (2, config.channels - 5), (2 * config.span, 3)):
            check(interpreter, inputs_of(seqlen, 4, d=d), activation="silu", return_final_state=True)


@pytest.mark.slow
def test_several_spans_of_a_program(interpreter, monkeypatch):
    """As of many tokens: only a row's first span reaches into the state, only its last one leaves one."""
    monkeypatch.setattr(fused, "PROGRAMS", 4)
    with fused.force_configuration(fused.configurations()[1]):
        for batch, seqlen in ((2, 150), (5, 20), (3, 2)):
            check(interpreter, inputs_of(seqlen, 4, batch=batch), activation="silu", return_final_state=True)


def test_strided_inputs_and_transposed_states(interpreter):
    inputs = inputs_of(19, 4, d=6)
    inputs["initial_state"] = inputs["initial_state"].mT.contiguous().mT
    for layout in (
        lambda x: torch.nn.functional.pad(x, (16, 8))[..., 16:-8],
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    ):
        check(interpreter, inputs, layout=layout, return_final_state=True)


@pytest.mark.parametrize(("seqlen", "state_dtype"), each_value_once([2, 33], [torch.float32, torch.bfloat16]))
def test_half_precision(interpreter, seqlen, state_dtype):
    inputs = {name: x.bfloat16() for name, x in inputs_of(seqlen, 4, d=40).items()}
    inputs["initial_state"] = inputs["initial_state"].to(state_dtype)
    check(interpreter, inputs, 1e-2, activation="silu", return_final_state=True)


def test_a_text_in_pieces_is_the_whole_text(interpreter):
    """State by state, also where pieces are shorter than the state, with the gradient of the first state."""
    inputs = inputs_of(41, 5)

    def in_pieces(x, weight, bias, initial_state, **options):
        outputs, state = [], initial_state
        for piece in x.split([1, 2, 3, 17, 1, 4, 13], 1):
            y, state = short_conv(piece, weight, bias, initial_state=state, return_final_state=True, **options)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    wanted = results(short_conv_definition, inputs, dtype=torch.float64, return_final_state=True)
    for backend in BACKENDS:
        device = interpreter if backend == "triton" else "cpu"
        found = results(in_pieces, inputs, device=device, backend=backend)
        for what, x in found.items():
            assert rmse_ratio(x.cpu(), wanted[what]) <= FLOAT32, (backend, what)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_do_not_touch_each_other(interpreter):
    """Not even where the state of one holds NaN."""
    inputs = {name: x.to(interpreter) for name, x in inputs_of(9, 4, batch=3).items()}
    call = functools.partial(short_conv, causal=True, return_final_state=True, backend="triton")
    wanted = call(**inputs)
    inputs["initial_state"][1] = torch.nan
    found = call(**inputs)
    for got, plain in zip(found, wanted, strict=True):
        assert torch.equal(got[[0, 2]], plain[[0, 2]])
    assert found[0][1, :3].isnan().all()
    assert torch.equal(found[0][1, 3:], wanted[0][1, 3:])
    assert torch.equal(found[1], wanted[1])


def test_the_given_state_is_left_as_it_is_and_nothing_is_copied(interpreter):
    """One launch each way, which reads x where it lies."""
    inputs = {name: x.to(interpreter) for name, x in inputs_of(9, 4).items()}
    before, x = inputs["initial_state"].clone(), inputs["x"].requires_grad_()
    with record_launches(run=True) as launches:
        y, final = short_conv(**inputs, causal=True, return_final_state=True, backend="triton")
        (y.sum() + final.sum()).backward()
    assert [found.kernel.__name__ for found in launches] == ["_convolve", "_conv_gradients"]
    assert [found.arguments[number].data_ptr() for found, number in zip(launches, (0, 3), strict=True)] == [
        x.data_ptr()
    ] * 2
    assert torch.equal(inputs["initial_state"], before)
    assert final.data_ptr() != inputs["initial_state"].data_ptr()
