"""LION's mixing as one operation against its definition in float64: the output and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import FLOAT32, assert_bit_equal_twice, assert_refused, on_triton, packed, rmse_ratio, run
from nightly import each_value_once, nightly
from triton_on_cpu import PoisonedTorch

from matmix.kernels import lion_mixer
from matmix.kernels.lion import fused
from matmix.kernels.lion.definition import lion_mixer_definition

HEADS, HEADDIM = 3, 10
CASES = {
    "no gates": ({"feature_map": "elu"}, None),
    "gates of heads": ({"feature_map": "silu"}, "head"),
    "gates of tokens": ({}, "token"),
    "both offsets": ({"forward_gate_offset": 1, "feature_map": "elu"}, "token"),
    "no offset": ({"gate_offset": 0, "eps": 1e-2}, "token"),
}


def inputs(seqlen: int, gates: str | None, batch: int) -> dict:
    shapes = {None: None, "head": (HEADS,), "token": (batch, seqlen, HEADS)}
    logits = None if gates is None else 2 * torch.randn(shapes[gates]) + 1
    return {"qkv": torch.randn(batch, seqlen, 3 * HEADS * HEADDIM), "gates": logits}


@pytest.fixture
def all_poisoned(poisoned, monkeypatch):
    """Buffers of all kernels start out as NaN."""
    monkeypatch.setattr(fused, "torch", PoisonedTorch())


def errors(case, seqlen, device, dtype=torch.float32, cu_seqlens=None):
    options, gates = CASES[case]
    given = inputs(seqlen, gates, 1 if cu_seqlens is not None else 2)
    given["qkv"] = given["qkv"].to(dtype).float()
    options = options | {"nheads": HEADS, "cu_seqlens": cu_seqlens}
    wanted = run(lion_mixer_definition, given, torch.float64, **options)
    op = on_triton(lion_mixer, device)
    got = run(lambda qkv, **rest: op(qkv=qkv.to(dtype), **rest).float(), given, torch.float32, **options)
    return {name: rmse_ratio(got[name], x) for name, x in wanted.items()}


@pytest.mark.parametrize(("case", "seqlen"), each_value_once(list(CASES), [67, 2]))
def test_output_and_gradients(interpreter, all_poisoned, case, seqlen):
    found = errors(case, seqlen, interpreter)
    assert not {name: error for name, error in found.items() if not error <= FLOAT32}


@pytest.mark.parametrize("case", [nightly(case, condition=case in ("gates of heads", "no offset")) for case in CASES])
def test_packed_documents(interpreter, all_poisoned, case):
    found = errors(case, 97, interpreter, cu_seqlens=packed([3, 1, 0, 64, 29]))
    assert not {name: error for name, error in found.items() if not error <= FLOAT32}


@pytest.mark.parametrize(("case", "backend"), each_value_once(list(CASES), ["triton", "torch"]))
def test_row_sums_and_their_gradients(interpreter, all_poisoned, case, backend):
    options, gates = CASES[case]
    given, options = inputs(19, gates, 1), options | {"nheads": HEADS, "return_row_sums": True}
    wanted = run(lion_mixer_definition, given, torch.float64, **options)
    op = on_triton(lion_mixer, interpreter) if backend == "triton" else lion_mixer
    found = {name: rmse_ratio(got, wanted[name]) for name, got in run(op, given, torch.float32, **options).items()}
    assert not {name: error for name, error in found.items() if not error <= FLOAT32}


def test_a_single_token_is_its_value(interpreter, all_poisoned):
    given = inputs(1, "token", 2)
    y = on_triton(lion_mixer, interpreter)(**given, nheads=HEADS)
    torch.testing.assert_close(y, given["qkv"][..., 2 * HEADS * HEADDIM :], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gates of heads", "gates of tokens"])
def test_in_bfloat16(interpreter, all_poisoned, case):
    found = errors(case, 131, interpreter, torch.bfloat16)
    assert not {name: error for name, error in found.items() if not error <= 2e-2}
    assert found["output 0"] <= 5e-3


@pytest.mark.parametrize("case", CASES)
def test_the_pytorch_form(case):
    options, gates = CASES[case]
    cu_seqlens = packed([3, 1, 0, 33])
    given, options = inputs(37, gates, 1), options | {"nheads": HEADS, "cu_seqlens": cu_seqlens}
    wanted = run(lion_mixer_definition, given, torch.float64, **options)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, FLOAT32)):
        got = run(lion_mixer, given, dtype, **options)
        assert all(rmse_ratio(got[name], x) <= bound for name, x in wanted.items())


@pytest.mark.slow
def test_the_same_bits_again(interpreter):
    assert_bit_equal_twice(on_triton(lion_mixer, interpreter), inputs(67, "token", 2), nheads=HEADS)


def test_open_and_closed_gates_keep_their_digits(interpreter):
    """Their logarithms are tiny, or as large as the logits."""
    given = inputs(20, "token", 1)
    given["gates"] = torch.randn(1, 20, HEADS) + torch.tensor([14.0, 0.0, -14.0])
    options = {"nheads": HEADS}
    wanted = run(lion_mixer_definition, given, torch.float64, **options)
    got = run(on_triton(lion_mixer, interpreter), given, torch.float32, **options)
    for head in range(HEADS):
        assert rmse_ratio(got["d gates"][..., head], wanted["d gates"][..., head]) <= 10 * FLOAT32


def test_bad_arguments():
    given = inputs(8, "token", 1) | {"nheads": HEADS}
    changes = {
        "qkv has shape": {"nheads": 4},
        "feature_map is 'relu'": {"feature_map": "relu"},
        "gate_offset is 2": {"gate_offset": 2},
        "gates has shape": {"gates": torch.zeros(2)},
        "eps is -1.0": {"eps": -1.0},
        "needs CUDA tensors": {"backend": "triton"},
    }
    assert_refused({message: partial(lion_mixer, **given | change) for message, change in changes.items()})
