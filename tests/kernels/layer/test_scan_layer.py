"""The layer as one operation against its definition in float64: the output and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import FLOAT32, assert_bit_equal_twice, assert_refused, on_triton, packed, rmse_ratio, run
from layers import PARAMETERS, layer_inputs
from nightly import nightly
from triton_on_cpu import PoisonedTorch

from matmix.kernels import scan_layer
from matmix.kernels.gated_norm import fused as fused_norm
from matmix.kernels.scan_layer import fused, steps
from matmix.kernels.scan_layer.definition import scan_layer_definition
from matmix.kernels.short_conv import fused as fused_conv

HYDRA = {"directions": 2, "shift": True}
SSD = {"directions": 1, "norm_first": False, "group_size": 8}
CASES = {
    "hydra": (HYDRA, {}),
    "hydra, groups, states, limits": (
        HYDRA | {"dt_limits": (0.3, 0.9), "group_size": 24},
        {"groups": 2, "states": True, "heads": 4},
    ),
    "hydra without biases": (HYDRA, {"conv_bias": False, "taps": 3}),
    "sum of two scans": ({"shift": False}, {"own_steps": True, "diagonal": "none"}),
    "sum and diagonal": ({"shift": False}, {"own_steps": True}),
    "shifted sum": ({"shift": True}, {"own_steps": True, "diagonal": "none"}),
    "hydra, each head its own vectors": (HYDRA, {"groups": 3, "heads": 3, "headdim": 20}),
    "ssd": (SSD, {"taps": 4, "diagonal": "constant"}),
    "ssd, norm first, groups": (
        {"directions": 1},
        {"taps": 2, "diagonal": "constant", "groups": 2, "heads": 4, "states": True},
    ),
}


def errors(options, sizes, seqlen, device, dtype=torch.float32, cu_seqlens=None, **only_ours):
    """Of the op in Triton, relative to the definition of the same rounded inputs."""
    batch = 1 if cu_seqlens is not None else 2
    inputs = layer_inputs(seqlen, batch=batch, directions=options.get("directions", 2), **sizes)
    counts = {"nheads": inputs["dt_bias"].shape[-1], "ngroups": sizes.get("groups", 1), "d_state": 6}
    given = options | counts | {"cu_seqlens": cu_seqlens}
    inputs["projected"] = inputs["projected"].to(dtype).float()
    wanted = run(scan_layer_definition, inputs, torch.float64, **given)
    op = on_triton(scan_layer, device)

    def in_dtype(projected, **rest):
        return op(projected=projected.to(dtype), **rest).float()

    got = run(in_dtype, inputs, torch.float32, **given, **only_ours)
    assert set(got) >= {"output 0", "d projected"} | {f"d {name}" for name in PARAMETERS if inputs[name] is not None}
    return {name: rmse_ratio(got[name], x) for name, x in wanted.items()}


@pytest.fixture
def all_poisoned(poisoned, monkeypatch):
    """Buffers of all kernels of the layer start out as NaN."""
    for module in (fused, steps, fused_norm, fused_conv):
        monkeypatch.setattr(module, "torch", PoisonedTorch())


# The others differ from one of these by an option, which short sequences see every time too.
OFTEN = ("hydra", "hydra, groups, states, limits", "ssd")


@pytest.mark.parametrize(
    ("case", "seqlen"),
    [nightly(case, n, condition=n == 67 and case not in OFTEN) for case in CASES for n in (2, 67)]
    + [nightly(case, 1, condition=case != "hydra") for case in CASES],
)
def test_output_and_gradients(interpreter, all_poisoned, case, seqlen):
    options, sizes = CASES[case]
    found = errors(options, sizes, seqlen, interpreter, recompute=seqlen == 2)
    assert not {name: error for name, error in found.items() if not error <= FLOAT32}


@pytest.mark.parametrize("case", [nightly(case, condition=case not in ("hydra", "ssd")) for case in CASES])
def test_packed_documents(interpreter, all_poisoned, case):
    options, sizes = CASES[case]
    cu_seqlens = packed([3, 1, 0, 64, 29])
    found = errors(options, sizes, 97, interpreter, cu_seqlens=cu_seqlens, recompute=True)
    assert not {name: error for name, error in found.items() if not error <= FLOAT32}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hydra", "hydra, groups, states, limits", "ssd"])
def test_in_bfloat16(interpreter, all_poisoned, case):
    """The projection is bfloat16 and what the parts hand on too; parameters are float32, as autocast has them."""
    options, sizes = CASES[case]
    found = errors(options, sizes, 131, interpreter, torch.bfloat16)
    assert all(error <= 2e-2 for error in found.values()), found
    assert found["output 0"] <= 5e-3


@pytest.mark.parametrize("chunk_size", [16, nightly(64)])
def test_states_through_chunks(interpreter, all_poisoned, chunk_size):
    found = errors(*CASES["hydra"], 67, interpreter, chunk_size=chunk_size)
    assert not {name: error for name, error in found.items() if not error <= FLOAT32}


@pytest.mark.parametrize("case", CASES)
def test_the_pytorch_form(case):
    options, sizes = CASES[case]
    inputs = layer_inputs(37, batch=2, directions=options.get("directions", 2), **sizes)
    given = options | {"nheads": inputs["dt_bias"].shape[-1], "ngroups": sizes.get("groups", 1), "d_state": 6}
    wanted = run(scan_layer_definition, inputs, torch.float64, **given)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, FLOAT32)):
        got = run(scan_layer, inputs, dtype, **given)
        assert all(rmse_ratio(got[name], x) <= bound for name, x in wanted.items())


@pytest.mark.slow
def test_the_same_bits_again_and_when_recomputed(interpreter):
    inputs = layer_inputs(67, batch=2)
    given = HYDRA | {"nheads": 2, "ngroups": 1, "d_state": 6}
    op = on_triton(scan_layer, interpreter)
    assert_bit_equal_twice(op, inputs, **given)
    plain, again = (run(op, inputs, torch.float32, **given, recompute=kept) for kept in (False, True))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_slice_of_a_wider_projection(interpreter):
    inputs = layer_inputs(35, batch=2)
    given = HYDRA | {"nheads": 2, "ngroups": 1, "d_state": 6}
    op = on_triton(scan_layer, interpreter)

    def sliced(projected, **rest):
        wide = torch.cat([projected, projected], -1)
        return op(projected=wide[..., : projected.shape[-1]], **rest)

    plain, found = (run(f, inputs, torch.float32, **given) for f in (op, sliced))
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_large_and_small_step_sizes(interpreter):
    """softplus keeps its digits where steps are tiny, and is the identity where they are large."""
    inputs = layer_inputs(16, batch=1)
    with torch.no_grad():
        inputs["dt_bias"] = torch.tensor([-12.0, 25.0])
        inputs["A_log"] = torch.tensor([0.0, -8.0])
    given = HYDRA | {"nheads": 2, "ngroups": 1, "d_state": 6}
    wanted = run(scan_layer_definition, inputs, torch.float64, **given)
    got = run(on_triton(scan_layer, interpreter), inputs, torch.float32, **given)
    assert all(rmse_ratio(got[name], x) <= FLOAT32 for name, x in wanted.items())


def test_bad_arguments():
    given = layer_inputs(8, batch=1) | {"nheads": 2, "ngroups": 1, "d_state": 6}
    changes = {
        "directions is 3": {"directions": 3},
        "divisor of the width": {"nheads": 5},
        "must not be below": {"dt_limits": (1.0, 0.5)},
        "4 taps": {"conv_weight": torch.zeros(48, 4)},
        "give zeros": {"D": None},
        "group_size is 7; use a divisor": {"group_size": 7},
        "projected has shape": {"d_state": 5},
        "needs CUDA tensors": {"backend": "triton"},
        "chunk_size is 20": {"chunk_size": 20},
    }
    assert_refused({message: partial(scan_layer, **given | change) for message, change in changes.items()})
