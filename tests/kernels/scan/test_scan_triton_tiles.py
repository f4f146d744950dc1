"""The scans' Triton form does not depend on tiles, chunks, launches or how its inputs lie in memory; and what it
gives is the same to the last bit each time."""

from __future__ import annotations

import itertools

import pytest
import torch
from compare import packed, run
from nightly import each_value_once, nightly
from scans import DTYPES, check, on
from test_quasiseparable import FORMS, make_for
from test_semiseparable import make

from matmix.kernels import quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide
from matmix.kernels.semiseparable.fused import launch as fused
from matmix.kernels.semiseparable.fused import scan
from matmix.kernels.semiseparable.fused.scan import MEASURED, choose

pytestmark = pytest.mark.usefixtures("poisoned")
SMALL = {"batch": 1, "heads": 2, "groups": 1}


def tiles_for(device, config):
    """A configuration and the dtype to run it in. The interpreter runs all in float32; a GPU's memory next to its
    cores does not hold float32 tiles of the sizes that half precision has."""
    if device == "cpu":
        return config._replace(itemsize=4), torch.float32
    return config, torch.float32 if config.itemsize == 4 else torch.bfloat16


@pytest.mark.parametrize(
    ("form", "config"), each_value_once(["hydra", "lion", "unshifted product"], fused.configurations())
)
def test_every_configuration(interpreter, config, form):
    """Full and odd widths, with chunks that the row fills and not; blocks of d_state and headdim."""
    config, dtype = tiles_for(interpreter, config)
    with fused.force_configuration(config):
        inputs = make_for(form, 150, batch=1, heads=1, groups=1, d_state=70, headdim=35)
        check(interpreter, quasiseparable_scan, inputs, dtype, **FORMS[form])


@pytest.mark.parametrize("config", fused.configurations())
def test_every_configuration_on_documents(interpreter, config):
    config, dtype = tiles_for(interpreter, config)
    with fused.force_configuration(config):
        inputs = make(137, **SMALL, states=4)
        given = {"return_final_state": True, "cu_seqlens": packed([3, 0, 129, 5])}
        check(interpreter, semiseparable_scan, inputs, dtype, **given)


def test_the_rule_picks_every_configuration_and_no_other():
    picked = {
        choose(dtype, seqlen, None, architecture)
        for dtype in (torch.float32, torch.bfloat16)
        for seqlen in (64, 65, 128, 100_000)
        for architecture in ("", *MEASURED)
    }
    for config in fused.configurations():
        assert config in picked
    # Others have chunks cut to the row.
    assert {x for x in picked if max(x.forward_chunk, x.backward_chunk) > 128} <= set(fused.configurations())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [16, nightly(32), 64, nightly(128), 256])
def test_chunks(interpreter, chunk, dtype):
    """Asked for, and (but for 256, which no configuration has) forced: rows of the mixer in several programs."""
    inputs = make_for("unshifted", 140, **SMALL)
    check(interpreter, quasiseparable_scan, inputs, dtype, chunk_size=chunk, **FORMS["unshifted"])
    if interpreter == "cpu" and chunk < 256:
        config = choose(torch.float32, 1000, None)._replace(forward_chunk=chunk, backward_chunk=chunk)
        with fused.force_configuration(config):
            check(interpreter, semiseparable_scan, make(140, **SMALL), return_final_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["hydra", "lion", "unshifted both"])
@pytest.mark.parametrize("programs", [8, 512, 1])
def test_heads_of_a_program(interpreter, launched, monkeypatch, form, programs, dtype):
    """One, some or all heads of a group in a program; parts of the gradients of q and k are summed afterwards."""
    monkeypatch.setattr(scan, "PROGRAMS", programs)
    config = choose(dtype, 40, None)._replace(heads=2)
    with fused.force_configuration(config):
        inputs = make_for(form, 40, batch=1, heads=8, groups=2)
        check(interpreter, quasiseparable_scan, inputs, dtype, **FORMS[form])
    if interpreter == "cpu":
        seen = {(found.kernel.__name__, found.constants.get("HEADS")) for found in launched}
        assert ("pair_gradients", {1: 4, 8: 2, 512: 1}[programs]) in seen
        assert ("mix", 1 if programs == 512 else 2) in seen


def test_a_program_has_a_whole_part_of_a_group(interpreter, monkeypatch):
    """Two of three heads would fit the GPU best, but they cannot share programs evenly."""
    monkeypatch.setattr(scan, "PROGRAMS", 6)
    check(interpreter, semiseparable_scan, make(40, batch=1, heads=6, groups=2), return_final_state=True)


def split_projection(tensors):
    """v, q and k as slices of one wide tensor, as a layer has them."""
    names = [name for name in tensors if name[0] in "vqk"]
    whole = torch.cat([tensors[name].flatten(2) for name in names], -1)
    widths = [tensors[name].shape[2] * tensors[name].shape[3] for name in names]
    parts = zip(names, whole.split(widths, -1), strict=True)
    return tensors | {name: part.unflatten(-1, tensors[name].shape[2:]) for name, part in parts}


def heads_first(tensors):
    return {name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x for name, x in tensors.items()}


def innermost_apart(tensors):
    """The last dimension no longer side by side, of any tensor; one of the states is a row that is repeated."""
    return {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in tensors.items()}


def expanded(tensors):
    """A factor per head is repeated for each token, without taking memory; so is a state for each document."""
    batch, seqlen = tensors["v"].shape[:2]
    return {name: x.expand(batch, seqlen, -1) if x.dim() == 1 else x for name, x in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["hydra", "causal", "unshifted both", "lion"])
@pytest.mark.parametrize("layout", [split_projection, heads_first, innermost_apart, expanded])
def test_layouts(interpreter, form, layout, dtype):
    options = {"kind": "head", "diagonal": "head"} if layout is expanded else {}
    shape = {"batch": 2, "heads": 2, "groups": 2} | options
    if form == "causal":
        inputs = make(34, **shape, states=2)
        check(interpreter, semiseparable_scan, inputs, dtype, layout=layout, return_final_state=True)
    else:
        # Beyond the last token lies no decay of a token, but that of a head, which a state enters by.
        states = 0 if layout is expanded and "gate_offset" in FORMS[form] else 2
        inputs = make_for(form, 34, **shape, states=states)
        check(interpreter, quasiseparable_scan, inputs, dtype, layout=layout, **FORMS[form])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_cotangents(interpreter, dtype):
    v, q, k = (torch.randn(1, 20, 2, 6).to(interpreter, dtype) for _ in range(3))
    decay, scale, diagonal = (-torch.rand(1, 20, 2, device=interpreter) for _ in range(3))
    sides = ScanSide(q, k, decay, scale, None, False), ScanSide(k, q, decay, scale, None, True)
    whole = torch.randn(1, 2, 20, 13).to(interpreter, dtype)
    for form, width in ((ScanForm(shift=True), 6), (ScanForm(combine="concat"), 12)):
        for dy in (
            whole[..., :width].mT.contiguous().mT,
            whole[..., 1 : width + 1],
            whole[..., :1].expand(1, 2, 20, width),
        ):
            dy = dy.transpose(1, 2)
            got, wanted = (
                fused.backward(x, None, None, ScanCall(v, sides, diagonal, form)) for x in (dy, dy.contiguous())
            )
            for x, y in zip(flat(got), flat(wanted), strict=True):
                assert torch.equal(x, y)


def flat(gradients):
    dv, sides, ddiagonal = gradients
    return [dv, ddiagonal, *(x for x in itertools.chain(*sides) if x is not None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [nightly("causal"), "hydra", nightly("lion")])
def test_same_bits_twice(interpreter, form, dtype):
    """Also where several programs' parts of gradients are summed."""
    lengths = [1, 5, 40, 0, 3]
    options = {"cu_seqlens": packed(lengths)}
    if form == "causal":
        op, inputs = semiseparable_scan, make(49, batch=1, heads=2, groups=1, states=5)
        options["return_final_state"] = True
    else:
        op, inputs = quasiseparable_scan, make_for(form, 49, batch=1, heads=2, groups=1, states=5)
        options |= FORMS[form]
    first, second = (run(on(interpreter, op), inputs, dtype, **options) for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("op", [semiseparable_scan, quasiseparable_scan])
def test_one_row_and_head_share_no_memory(interpreter, op):
    """Gradients of both directions' initial states are tensors of their own also where a slice would be whole."""
    shape = {"batch": 1, "heads": 1, "groups": 1, "states": 1}
    inputs = make(20, **shape) if op is semiseparable_scan else make_for("hydra", 20, **shape)
    check(interpreter, op, inputs)
