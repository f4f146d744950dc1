"""The MRU's speed commands: what its peers compute, what its floors count, and what is said of cost over length."""

import json
from functools import partial

import pytest
import torch

from matmix.benchmarks.__main__ import main
from matmix.benchmarks.measure import both_passes, largest_error, on_leaves
from matmix.benchmarks.models import SIZES, LanguageModel, same_size_gpt
from matmix.benchmarks.operations import Mru, Size, our_parts, unfused
from matmix.benchmarks.peers import Missing, product_by, recurrent_product
from matmix.benchmarks.report import per_token, per_token_text
from matmix.kernels import matrix_product_scan, mru_mixer
from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.mru.constructions import CONSTRUCTIONS, state_elements
from matmix.model.build import count_parameters

SMALLEST = "mru --device cpu --tokens 32 --lengths 16 --sizes 4x1 --rounds 1 --no-compile --no-plot"
SCANS = {
    "Brent-Kung": product_by("brent_kung"),
    "Hillis-Steele": product_by("hillis_steele"),
    "loop": recurrent_product,
}


SMALL = {"device": "cpu", "dtype": "float32", "tokens": 96, "rounds": 2, "compile": False}


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
@pytest.mark.parametrize("seqlen", [1, 2, 3, 5, 13, 64, 100])
def test_public_scans_are_the_product_at_any_length(scan, seqlen):
    x = torch.linalg.qr(torch.randn(2, seqlen, 3, 4, 4, dtype=torch.float64))[0].requires_grad_()
    cotangent = torch.randn_like(x)
    wanted = both_passes(on_leaves("definition", matrix_product_definition, [x], cotangent))
    by_head = on_leaves("scan", lambda x: scan(x.transpose(1, 2).contiguous()).transpose(1, 2), [x], cotangent)
    assert largest_error(both_passes(by_head), wanted) < 1e-12


def test_public_scans_leave_their_inputs_alone():
    x, g = torch.randn(2, 1, 2, 11, 4, 4).unbind(0)
    x.requires_grad_()
    kept = x.detach().clone(), g.clone()
    for scan in SCANS.values():
        torch.autograd.grad(scan(x), x, g)
        assert torch.equal(x, kept[0])
        assert torch.equal(g, kept[1])


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_the_mixer_from_parts_is_the_mixer(construction):
    elements = 0.1 * torch.randn(2, 21, 3, state_elements(construction, 4))
    leaves = [elements.requires_grad_(), torch.randn(3, 4, 5, requires_grad=True)]
    cotangent = torch.randn(2, 21, 3, 4, 5)
    wanted = both_passes(on_leaves("ours", partial(mru_mixer, construction=construction), leaves, cotangent))
    parts = [unfused(scan, construction) for scan in SCANS.values()]
    for op in (*parts, partial(our_parts, construction=construction)):
        assert largest_error(both_passes(on_leaves("parts", op, leaves, cotangent)), wanted) < 1e-5


def test_peers_start_from_our_tensors_laid_out_for_them():
    candidates = Mru(**SMALL).scan_case(48, Size(4, 2)).candidates
    ours, theirs = candidates[0].leaves[0], candidates[1].leaves[0]
    assert torch.equal(ours, theirs)
    assert ours.is_contiguous()
    assert theirs.transpose(1, 2).is_contiguous()
    assert torch.equal(candidates[0].cotangent, candidates[1].cotangent)


def test_the_loop_is_left_out_where_it_takes_too_long():
    case = Mru(**SMALL | {"tokens": 1}).scan_case(4097, Size(4, 1))
    with pytest.raises(Missing, match="left out beyond length 4,096"):
        case.candidates[-1].run()


@pytest.mark.parametrize(
    ("construction", "forward", "backward"), [("cayley", 2256, 2976), ("ldu", 3072, 4608), ("householder", 2256, 2976)]
)
def test_floors_are_the_bytes_counted_by_hand(construction, forward, backward):
    options = SMALL | {"construction": construction}
    scan = Mru(**options).scan_case(48, Size(16, 3)).candidates[0].floor
    assert (scan["forward"], scan["backward"]) == (96 * 768 * 8, 96 * 768 * 16)
    mixer = Mru(**options | {"dtype": "bfloat16"}).mixer_case(48, Size(16, 3)).candidates[0].floor
    weights = 3 * 16 * 16 * 4
    assert (mixer["forward"], mixer["backward"]) == (96 * forward + weights, 96 * backward + 2 * weights)


def test_elements_are_bfloat16_and_scans_float32_unless_a_dtype_is_given(tmp_path):
    words = SMALLEST.split()
    assert main([*words, "--out", str(tmp_path / "found.json")]) == 0
    cases = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert [(case["kind"], case["dtype"]) for case in cases] == [
        ("scan, o 4, 1 heads, float32", "float32"),
        ("mixer, cayley, o 4, 1 heads, bfloat16", "bfloat16"),
    ]
    assert all(found["agrees"] for case in cases for found in case["candidates"][1:])
    assert main([*words, "--kind", "scan", "--dtype", "bfloat16", "--out", str(tmp_path / "low.json")]) == 0
    (case,) = json.loads((tmp_path / "low.json").read_text())["cases"]
    assert case["dtype"] == "bfloat16"


def test_a_cost_that_grows_with_the_length_is_said_to():
    def case(seqlen, batch, **milliseconds):
        found = [
            {"candidate": name, "seconds": {"both": {"median": value * 1e-3}}} for name, value in milliseconds.items()
        ]
        return {"kind": "scan", "seqlen": seqlen, "batch": batch, "candidates": [*found, {"candidate": "absent"}]}

    # The last case has twice the tokens.
    costs = per_token(
        [case(100, 10, ours=1.0, loop=1.0, once=3.0), case(1000, 1, ours=1.19), case(2000, 1, ours=2, loop=9)]
    )
    assert [(cost["candidate"], cost["constant"]) for cost in costs] == [("ours", True), ("loop", False)]
    assert costs[0]["seconds"] == pytest.approx([1e-6, 1.19e-6, 1e-6])
    assert costs[0]["dearest_over_cheapest"] == pytest.approx(1.19)
    lines = per_token_text(costs).splitlines()
    assert lines[-2].split() == ["ours", "1,000", "1,190", "1,000", "1.19", "constant"]
    assert lines[-1].split() == ["loop", "1,000", "-", "4,500", "4.50", "not", "constant"]


@pytest.mark.parametrize("size", SIZES)
def test_the_gpt_has_as_many_parameters(size):
    mru = LanguageModel(device="cpu").mru_model(size)
    gpt = same_size_gpt(mru)
    assert gpt.layers == ("attention",)
    assert count_parameters(gpt) == pytest.approx(count_parameters(mru), rel=0.01)
    assert round(gpt.mlp_ratio * gpt.d_model) % 64 == 0


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["Brent-Kung", "Hillis-Steele"])
def test_compiled_scans_are_compiled_as_a_whole(scan):
    x = torch.linalg.qr(torch.randn(2, 2, 13, 4, 4))[0].requires_grad_()
    cotangent = torch.randn_like(x)
    compiled = torch.compile(SCANS[scan], dynamic=False, fullgraph=True)
    wanted = both_passes(on_leaves("eager", SCANS[scan], [x], cotangent))
    assert largest_error(both_passes(on_leaves("compiled", compiled, [x], cotangent)), wanted) < 1e-5
    ours = matrix_product_scan(x.transpose(1, 2)).transpose(1, 2)
    assert largest_error((compiled(x),), (ours,)) < 1e-5
