"""The causal scan against its recurrence: outputs, final states, every gradient."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bit_equal_twice, assert_matches, packed, rmse_ratio
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import each_value_once

from matmix.kernels import semiseparable_scan
from matmix.kernels.semiseparable.chunked import semiseparable_chunked
from matmix.kernels.semiseparable.definition import semiseparable_definition

LENGTHS = [1, 2, 63, 64, 65, 127, 257, 1000]
DECAYS = ["token", "head", "none", "zero", "strong", "mixed", "growing"]
DOCUMENTS = [[1, 5, 64, 3, 130], [1] * 9, [0, 70, 0, 1, 0], [1, 7, 64, 129, 30]]
CHUNKS = [None, 16, 32, 128]


def decays(kind: str, batch: int, seqlen: int, heads: int) -> torch.Tensor | None:
    ones = torch.ones(batch, seqlen, heads)
    return {
        "token": lambda: -0.3 * torch.rand(batch, seqlen, heads),
        "head": lambda: -torch.rand(heads),
        "none": lambda: None,
        "zero": lambda: 0 * ones,
        "growing": lambda: 0.01 - 0.02 * torch.rand(batch, seqlen, heads),
        "strong": lambda: -50 * ones,
        "mixed": lambda: torch.where(torch.rand(batch, seqlen, heads) < 0.1, -50.0, -0.02 * torch.rand(heads)),
    }[kind]()


def make(
    seqlen,
    *,
    batch=2,
    heads=4,
    groups=2,
    d_state=5,
    headdim=6,
    kind="token",
    scale=True,
    diagonal="token",
    states=0,
):
    inputs = {
        "v": torch.randn(batch, seqlen, heads, headdim),
        "q": torch.randn(batch, seqlen, groups, d_state),
        "k": torch.randn(batch, seqlen, groups, d_state),
        "log_decay": decays(kind, batch, seqlen, heads),
    }
    if scale:
        inputs["input_scale"] = torch.randn(batch, seqlen, heads)
    if diagonal:
        inputs["diagonal"] = torch.randn(batch, seqlen, heads) if diagonal == "token" else torch.randn(heads)
    if states:
        inputs["initial_state"] = torch.randn(states, heads, d_state, headdim)
    return inputs


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths(seqlen):
    assert_matches(semiseparable_scan, semiseparable_definition, make(seqlen, states=2), return_final_state=True)


@pytest.mark.parametrize(("kind", "states"), each_value_once(DECAYS, [2, 0]))
def test_decays(kind, states):
    inputs = make(150, kind=kind, states=states, diagonal="head")
    assert_matches(semiseparable_scan, semiseparable_definition, inputs, return_final_state=bool(states))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_and_large_steps(groups):
    """Heads share q and k in groups; input scales of about 50."""
    inputs = make(90, groups=groups)
    inputs["input_scale"] *= 50
    assert_matches(semiseparable_scan, semiseparable_definition, inputs, return_final_state=True)


def test_decays_up_to_the_bound_are_exact():
    """A state that grows by the bound at every step, over a whole chunk of the largest size."""
    inputs = make(300, batch=1, heads=1, groups=1)
    inputs["log_decay"] = torch.full((1, 300, 1), 0.01)
    for chunk in (16, 256):
        assert_matches(semiseparable_scan, semiseparable_definition, inputs, op_options={"chunk_size": chunk})


@pytest.mark.parametrize(
    ("lengths", "states", "kind"),
    each_value_once([*DOCUMENTS, [200, 1, 1, 40]], [True, False], ["token", "mixed"]),
)
def test_packed_documents(lengths, states, kind):
    inputs = make(sum(lengths), batch=1, kind=kind, states=len(lengths) if states else 0)
    assert_matches(
        semiseparable_scan,
        semiseparable_definition,
        inputs,
        cu_seqlens=packed(lengths),
        return_final_state=states,
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seqlen=st.integers(1, 90),
    groups=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from(CHUNKS),
    kind=st.sampled_from(DECAYS),
    scale=st.booleans(),
    diagonal=st.sampled_from([None, "token", "head"]),
    states=st.booleans(),
    cuts=st.lists(st.integers(0, 90), max_size=5),
)
def test_any_combination(seqlen, groups, chunk, kind, scale, diagonal, states, cuts):
    cuts = sorted({min(cut, seqlen) for cut in cuts})
    bounds = [0, *cuts, seqlen]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if cuts else None
    batch = 1 if cuts else 2
    rows = (len(bounds) - 1 if cuts else batch) if states else 0
    inputs = make(seqlen, batch=batch, groups=groups, kind=kind, scale=scale, diagonal=diagonal, states=rows)
    options = {"cu_seqlens": cu_seqlens, "return_final_state": states}
    for op in (semiseparable_scan, semiseparable_chunked):
        assert_matches(op, semiseparable_definition, inputs, op_options={"chunk_size": chunk}, **options)


def test_decay_of_exactly_zero():
    """log_decay -inf forgets everything; nothing becomes NaN."""
    inputs = make(40, kind="token")
    inputs["log_decay"][:, ::7] = -torch.inf
    assert_matches(semiseparable_scan, semiseparable_definition, inputs)


def test_final_state_continues_the_sequence():
    inputs = make(100)
    whole, end = semiseparable_scan(**inputs, return_final_state=True)
    first, state = semiseparable_scan(**{n: x[:, :37] for n, x in inputs.items()}, return_final_state=True)
    second, last = semiseparable_scan(
        **{n: x[:, 37:] for n, x in inputs.items()}, initial_state=state, return_final_state=True
    )
    assert rmse_ratio(torch.cat([first, second], 1), whole) < 1e-6
    assert rmse_ratio(last, end) < 1e-6


def test_gradcheck():
    inputs = {
        n: x.double().requires_grad_() for n, x in make(9, heads=2, d_state=2, headdim=2, groups=1, states=2).items()
    }

    def op(*tensors):
        return semiseparable_scan(**dict(zip(inputs, tensors, strict=True)), return_final_state=True)

    assert torch.autograd.gradcheck(op, tuple(inputs.values()), fast_mode=True)


def test_bit_equal_twice():
    assert_bit_equal_twice(semiseparable_scan, make(150, states=2), return_final_state=True)


def test_documents_are_bit_independent():
    """Changing one document changes no bit of the others, whatever shares its chunk."""
    lengths = [5, 20, 1, 80, 30]
    inputs = make(sum(lengths), batch=1)
    cu_seqlens = packed(lengths)
    before = semiseparable_scan(**inputs, cu_seqlens=cu_seqlens)
    changed = {n: x.clone() for n, x in inputs.items()}
    for name, x in changed.items():
        noise = torch.randn(x[:, 25:106].shape)
        x[:, 25:106] = -noise.abs() * 20 if name == "log_decay" else noise * 100
    after = semiseparable_scan(**changed, cu_seqlens=cu_seqlens)
    assert torch.equal(before[:, :25], after[:, :25])
    assert torch.equal(before[:, 106:], after[:, 106:])
    assert not torch.equal(before[:, 25:106], after[:, 25:106])


def test_bfloat16_keeps_float32_states():
    inputs = {n: x.bfloat16() for n, x in make(300).items()}
    y, state = semiseparable_scan(**inputs, return_final_state=True)
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    wanted, end = semiseparable_definition(**inputs, return_final_state=True)
    assert rmse_ratio(state, end) < 1e-5
    assert rmse_ratio(y, wanted) < 4e-3


def test_strided_inputs():
    """Slices of one projection, as a layer makes them."""
    both = torch.randn(2, 50, 4 * 6 + 2 * 5 + 2 * 5)
    v, q, k = (x.unflatten(-1, s) for x, s in zip(both.split([24, 10, 10], -1), [(4, 6), (2, 5), (2, 5)], strict=True))
    decay = -torch.rand(2, 4, 50).transpose(1, 2)
    wanted = semiseparable_scan(v.contiguous(), q.contiguous(), k.contiguous(), decay.contiguous())
    assert rmse_ratio(semiseparable_scan(v, q, k, decay), wanted) < 1e-6
