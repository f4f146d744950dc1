"""The scans' Triton form against their definition: every option, kinds of decays, lengths and widths.

Interpreted in float32 on the CPU; on a GPU the same tests also run in bfloat16. Every buffer that the kernels are to
fill starts out as NaN.
"""

from __future__ import annotations

import pytest
import torch
from compare import rmse_ratio, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import each_value_once
from scans import DEFINITIONS, DTYPES, check, on
from test_quasiseparable import FORMS, make_for
from test_semiseparable import CHUNKS, DECAYS, LENGTHS, make

from matmix.kernels import quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.definition import semiseparable_definition

pytestmark = pytest.mark.usefixtures("poisoned")
SMALL = {"batch": 1, "heads": 2, "groups": 1}
"""The interpreter takes about a millisecond per program."""
CAUSAL = "causal"
LONGEST = max(LENGTHS)


def check_form(device, form, seqlen, dtype=torch.float32, *, states=0, check_options=None, **options):
    """One of FORMS, or the causal scan with its final state (`CAUSAL`); where states are given, with final ones."""
    check_options = check_options or {}
    if form == CAUSAL:
        if "scales" in options:
            options["scale"] = bool(options.pop("scales")[0])
        inputs = make(seqlen, states=states, **options)
        check(device, semiseparable_scan, inputs, dtype, return_final_state=True, **check_options)
    else:
        inputs = make_for(form, seqlen, states=states, **options)
        finals = "initial_state_forward" in inputs
        check(device, quasiseparable_scan, inputs, dtype, return_final_states=finals, **check_options, **FORMS[form])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "seqlen"), each_value_once([CAUSAL, *FORMS], [65, *LENGTHS[:-1]]))
def test_lengths(interpreter, form, seqlen, dtype):
    gradients = "none" if dtype == torch.bfloat16 and seqlen <= 2 else "all"
    shape = SMALL if seqlen > 2 else {"batch": 2, "heads": 2, "groups": 2}
    states = shape["batch"] if seqlen < 100 else 0
    check_form(interpreter, form, seqlen, dtype, states=states, **shape, check_options={"gradients": gradients})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [CAUSAL, *FORMS])
def test_long(interpreter, form, dtype):
    check_form(interpreter, form, LONGEST, dtype, batch=1, heads=1, groups=1, states=1, d_state=3, headdim=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "kind"),
    each_value_once([CAUSAL, "hydra", "halved", "product", "both", "lion"], ["mixed", "none", *DECAYS, "forgets"]),
)
def test_decays(interpreter, form, kind, dtype):
    """Of every kind; "forgets" has some that are exactly 0 (log -inf)."""
    states = 0 if form == "lion" else 1
    op, options = (semiseparable_scan, {}) if form == CAUSAL else (quasiseparable_scan, FORMS[form])
    of_kind = {"kind": "token" if kind == "forgets" else kind, "diagonal": "head", "states": states}
    inputs = make(45, **SMALL, **of_kind) if form == CAUSAL else make_for(form, 45, **SMALL, **of_kind)
    if kind == "forgets":
        for name in inputs:
            if name.startswith("log_decay"):
                inputs[name][:, ::7] = -torch.inf
    check(interpreter, op, inputs, dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "which"), each_value_once(["hydra", "unshifted", "both", "lion"], ["forward", "backward"])
)
def test_one_direction_without_decay(interpreter, form, which, dtype):
    inputs = make_for(form, 70, **SMALL) | {f"log_decay_{which}": None}
    check(interpreter, quasiseparable_scan, inputs, dtype, **FORMS[form])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "scales"), each_value_once([CAUSAL, "hydra", "product", "both", "lion"], [(0, 0), (0, 1), (1, 0)])
)
def test_scales(interpreter, form, scales, dtype):
    """Input scales of none, or one direction; no diagonal where there are none."""
    options = {"scales": scales, "diagonal": "token" if any(scales) else None}
    check_form(interpreter, form, 40, dtype, **SMALL, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "diagonal"), each_value_once([CAUSAL, "hydra", "product", "both", "lion"], [None, "head"])
)
def test_diagonals(interpreter, form, diagonal, dtype):
    check_form(interpreter, form, 33, dtype, batch=2, heads=1, groups=1, diagonal=diagonal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "groups"), each_value_once([CAUSAL, "hydra", "product", "both", "lion"], [2, 4, 1]))
def test_groups_and_large_steps(interpreter, form, groups, dtype):
    """Heads share q and k in groups; input scales of about 50."""
    if form == CAUSAL:
        inputs = make(40, batch=1, heads=4, groups=groups)
        inputs["input_scale"] *= 50
        check(interpreter, semiseparable_scan, inputs, dtype, return_final_state=True)
    else:
        check_form(interpreter, form, 40, dtype, batch=1, heads=4, groups=groups, scale=50.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "widths"),
    each_value_once(
        [CAUSAL, "hydra", "unshifted both", "lion"],
        [(70, 20), (128, 16), (16, 128), (1, 1), (20, 5), (5, 70), (64, 32), (32, 64), (128, 128), (16, 16)],
    ),
)
def test_widths(interpreter, form, widths, dtype):
    """d_state and headdim: tiles that are filled, that are not, and several; states in and out where the form has
    them."""
    d_state, headdim = widths
    check_form(interpreter, form, 35, dtype, batch=1, heads=1, groups=1, d_state=d_state, headdim=headdim, states=1)


@pytest.mark.parametrize("form", [CAUSAL, "hydra", "lion"])
def test_float16(interpreter, form):
    """On any machine: tiles of half precision, with states in float32. (test_bfloat16.py has the other.)"""
    check_form(interpreter, form, 140, torch.float16, batch=1, heads=1, groups=1)


def test_gradient_of_the_final_state_alone(interpreter):
    """The outputs' cotangent is absent, the initial state's gradient all decays."""
    inputs = make(70, **SMALL, states=1)

    def end(op):
        return lambda **given: op(**given, return_final_state=True)[1]

    got = run(end(on(interpreter, semiseparable_scan)), inputs, torch.float32)
    wanted = run(end(DEFINITIONS[semiseparable_scan]), inputs, torch.float64)
    assert max(rmse_ratio(got[name], wanted[name]) for name in wanted) < 1e-5


@pytest.mark.slow
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # which set things that are the same for all examples
)
@given(
    form=st.sampled_from([CAUSAL, *FORMS]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    packed=st.booleans(),
    groups=st.sampled_from([1, 2]),
    share=st.sampled_from([1, 2]),
    d_state=st.integers(1, 35),
    headdim=st.integers(1, 35),
    chunk_size=st.sampled_from(CHUNKS),
    kind=st.sampled_from(DECAYS),
    scales=st.tuples(st.booleans(), st.booleans()),
    diagonal=st.sampled_from([None, "token", "head"]),
    states=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_combination(interpreter, form, lengths, packed, groups, share, chunk_size, states, dtype, **options):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    given = {"cu_seqlens": bounds if packed else None, "chunk_size": chunk_size, "gradients": "all"}
    if dtype == torch.bfloat16:
        given["gradients"] = "none"
    batch = 1 if packed or sum(lengths) > 40 else 2
    states = (len(lengths) if packed else batch) if states else 0
    shape = {"batch": batch, "heads": groups * share, "groups": groups, "states": states}
    check_form(interpreter, form, sum(lengths), dtype, check_options=given, **shape, **options)


def test_float16_reads_states_beyond_its_range(interpreter):
    """A state of 200 x 900 is more than the 65,504 that float16 ends at; outputs are not."""
    ones = torch.ones(1, 200, 1, 16)
    inputs = {"v": 30 * ones, "q": 1e-4 * (ones + torch.rand_like(ones)), "k": 30 * ones}
    half = {name: x.half().to(interpreter).requires_grad_() for name, x in inputs.items()}
    y = semiseparable_scan(**half, log_decay=None, backend="triton", chunk_size=16)
    y.backward(torch.full_like(y, 1e-3))
    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in half.items()}
    wanted = semiseparable_definition(**exact, log_decay=None)
    wanted.backward(torch.full_like(wanted, 1e-3))
    assert rmse_ratio(y.cpu(), wanted) < 5e-3
    assert rmse_ratio(half["q"].grad.cpu(), exact["q"].grad) < 5e-3
