"""The selective scan of Mamba-1: its Triton and its PyTorch form against the definition, forward and every gradient.

Every buffer that the kernels are to fill starts out as NaN.
"""

from __future__ import annotations

import functools

import pytest
import torch
from compare import FLOAT32, assert_matches, assert_refused, packed, rmse_ratio, run
from nightly import nightly
from torch.nn.functional import pad
from triton_on_cpu import PoisonedTorch, names

from matmix.kernels import s6_scan, s6_scan_is_fused
from matmix.kernels.s6 import fused
from matmix.kernels.s6.definition import s6_definition
from matmix.model.mixers.scans import s6

DOCUMENTS = [5, 0, 17, 1, 8]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(fused, "torch", PoisonedTorch())


def make(seqlen, *, batch=1, d=5, states=3, initial=0):
    tokens, shared = (batch, seqlen, d), (batch, seqlen, states)
    inputs = {"x": torch.randn(tokens), "dt": torch.rand(tokens), "b": torch.randn(shared), "c": torch.randn(shared)}
    inputs["rates"] = -2 * torch.rand(d, states)
    return inputs | ({"initial_state": torch.randn(initial, d, states)} if initial else {})


def on(device):
    """The kernels on `device`, between tensors on the CPU; b and c lie in wider rows, as a projection is split."""

    def call(**inputs):
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
        moved |= {name: pad(moved[name], (4, 3))[..., 4:-3] for name in ("b", "c")}
        return tuple(y.cpu() for y in s6_scan(**moved))

    return call


def in_pytorch(x, dt, b, c, rates, initial_state=None, cu_seqlens=None):
    state = None if initial_state is None else initial_state.unsqueeze(-1)
    y, state = s6.selective_scan((x, dt, b, c, rates), 4, state, cu_seqlens)
    return y, state.squeeze(-1)


@pytest.mark.parametrize(
    ("seqlen", "shape", "documents"),
    [
        (13, {"d": 33}, None),
        (31, {"initial": 5}, DOCUMENTS),
        (1, {"initial": 1}, None),
        *(
            nightly(*case)
            for case in (
                *((seqlen, {"batch": 2, "d": 7, "states": 16}, None) for seqlen in (1, 2, 7, 8, 9, 16, 37, 97, 257)),
                (31, {"d": 70, "states": 16}, DOCUMENTS),
                (9, {"d": 3, "initial": 9, "states": 1}, [1] * 9),
                (20, {"batch": 2, "d": 40, "states": 100, "initial": 2}, None),
                (40, {"d": 32, "states": 32, "initial": 1}, [40]),
            )
        ),
    ],
)
def test_all_forms_agree(interpreter, seqlen, shape, documents):
    inputs, options = make(seqlen, **shape), {"cu_seqlens": None if documents is None else packed(documents)}
    for form in (on(interpreter), in_pytorch):
        assert_matches(form, s6_definition, inputs, **options)


@pytest.mark.slow
def test_half_precision(interpreter):
    """Tokens in half precision, step sizes, rates and sums in float32; gradients are typed like their inputs."""
    inputs = make(20, batch=2, d=40, states=16)
    leaves = {name: x.half() if name in "xbc" else x for name, x in inputs.items()}
    leaves = {name: x.to(interpreter).requires_grad_() for name, x in leaves.items()}
    y, state = s6_scan(**leaves)
    assert y.dtype == state.dtype == torch.float32
    exact, last = s6_definition(**leaves)
    assert rmse_ratio(y, exact) < FLOAT32
    gradients = torch.autograd.grad(y.square().sum() + state.sum(), leaves.values())
    wanted = torch.autograd.grad(exact.square().sum() + last.sum(), leaves.values())
    for (name, leaf), found, right in zip(leaves.items(), gradients, wanted, strict=True):
        assert found.dtype == leaf.dtype
        assert rmse_ratio(found, right) < (1e-3 if name in "xbc" else FLOAT32), name


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [0, 1])
def test_gradients_of_one_output_alone(interpreter, wanted):
    inputs = make(11, batch=2, d=6, initial=2)
    device = on(interpreter)
    assert_matches(lambda **given: device(**given)[wanted], lambda **given: s6_definition(**given)[wanted], inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_documents_stay_apart_and_bits_repeat(interpreter):
    """Bit for bit, even where one document holds NaN."""
    inputs, options = make(31, initial=5), {"cu_seqlens": packed(DOCUMENTS)}
    before, again = (run(on(interpreter), inputs, torch.float32, **options) for _ in range(2))
    assert all(torch.equal(before[name], again[name]) for name in before)
    x = inputs["x"].clone()
    x[:, 5:22] = torch.nan
    after = run(on(interpreter), inputs | {"x": x}, torch.float32, **options)
    others = [*range(5), *range(22, 31)]
    for name in ("output 0", "d x", "d dt", "d b", "d c"):
        assert torch.equal(before[name][:, others], after[name][:, others])
    assert after["output 0"][:, 5:22].isnan().all()
    assert torch.equal(before["d initial_state"][[0, 1, 3, 4]], after["d initial_state"][[0, 1, 3, 4]])


@pytest.mark.parametrize("documents", [DOCUMENTS, nightly(None)])
def test_the_layer_runs_on_the_kernels(interpreter, launched, monkeypatch, documents):
    """From a state to a state, with the numbers of the PyTorch form."""
    layer = s6.S6(8, s6.S6Config(d_state=3), causal=True, max_seqlen=64, output_std=0.02)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, cu_seqlens = torch.randn(1, 31, 8), None if documents is None else packed(documents)
    state = layer.initial_state(1)
    state = state[0], torch.randn(len(documents or [31]), *state[1].shape[1:])

    def found(device):
        layer.to(device).zero_grad()
        bounds = None if cu_seqlens is None else cu_seqlens.to(device)
        leaf = x.to(device).requires_grad_()
        parts, _ = layer.parts(leaf, cu_seqlens=bounds)
        y, last = layer.scan(parts, initial_state=state[1].to(device), cu_seqlens=bounds)
        (y.square().sum() + last.square().sum()).backward()
        gradients = {name: parameter.grad.cpu() for name, parameter in layer.named_parameters()}
        return gradients | {"y": y.cpu(), "state": last.cpu(), "x": leaf.grad.cpu()}

    wanted = found("cpu")
    assert not launched
    monkeypatch.setattr(s6, "s6_scan_is_fused", functools.partial(s6_scan_is_fused, backend="triton"))
    for name, value in found(interpreter).items():
        assert rmse_ratio(value, wanted[name]) < 1e-5, name
    assert [name for name in names(launched) if name.startswith("s6")] == ["s6_forward", "s6_forward", "s6_gradients"]


def test_what_does_not_fit_is_refused(interpreter):
    inputs, wide = ({name: x.to(interpreter) for name, x in make(4, states=n).items()} for n in (3, 129))
    assert_refused(
        {
            "s6_scan: dt has shape (1, 4, 5); expected (1, 3, 5)": lambda: s6_scan(
                **inputs | {"x": inputs["x"][:, :3]}
            ),
            "takes at most 128 states a channel, not 129": lambda: s6_scan(**wide),
            "expected (1, 5, 3)": lambda: s6_scan(**inputs, initial_state=inputs["rates"]),
        }
    )
