"""Products of matrices, the MRU mixer and delta rules over rows that several ranks hold parts of."""

from __future__ import annotations

import functools
import itertools

import mixer_parts_scenario
import product_scenario
import pytest
import torch
from harness import run_distributed
from mru_inputs import FUSED, mixer_inputs
from nightly import nightly
from parts_scenario import Case, check_parts, of_documents
from scan_cases import typed
from torch import Tensor

from matmix.kernels import mru_mixer
from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.kernels.mru.definition import mru_mixer_definition
from matmix.model.mixers.scans.delta_rule import delta_rule_step, unit_vectors

LENGTH = 72
BOUNDS = {
    "rows": None,
    "one": [0, LENGTH],
    "cuts": [0, 18, 24, 36, 48, 54, LENGTH],
    "off": [0, 1, 5, 61, 62, LENGTH],
    "short": [0, 3, 19, 20, 21, 32, 70, 71, LENGTH],
}
"""Documents over three and four ranks, of length 1, that end at cuts or beside them."""
HEADS, KEYS, VALUES = 2, 5, 3


def products() -> dict[str, Case]:
    cases = {}
    for (name, bounds), order, chunk in itertools.product(BOUNDS.items(), (4, 16), (None, 5, 100)):
        batch, rows, cu_seqlens = of_documents(bounds)
        inputs = {"x": torch.linalg.qr(torch.randn(batch, LENGTH, 2, order, order))[0]}
        if order == 4:
            inputs["initial_state"] = torch.randn(rows, 2, order, order)
        options = {"return_final_state": True}
        wanted = functools.partial(matrix_product_definition, **options)
        options["chunk_size"] = chunk
        label = f"{name}, order {order}, chunks of {chunk}"
        cases[label] = Case("matrix_product_scan", inputs, cu_seqlens, options, wanted)
    return cases


def mixers() -> dict[str, Case]:
    """All constructions that have a kernel, and the form that computes again in the backward pass."""
    cases = {}
    for (number, (name, bounds)), construction in itertools.product(enumerate(BOUNDS.items()), FUSED):
        batch, rows, cu_seqlens = of_documents(bounds)
        chunks, states = number % 2 * 3, rows if number in ((3,) if construction == "affine" else (2, 3, 4)) else 0
        order = 8 if number == 1 else 4
        inputs = mixer_inputs(LENGTH, construction, batch=batch, heads=2, order=order, states=states, d_chunk=chunks)
        options = {"construction": construction, "return_final_state": True}
        wanted = functools.partial(mru_mixer_definition, **options)
        for backend in ("auto", "torch"):
            case = Case("mru_mixer", inputs, cu_seqlens, options | {"backend": backend}, wanted)
            cases[f"{backend}, {name}, {construction}"] = case
    return cases


def other_mixers() -> dict[str, Case]:
    """All constructions without a kernel; whole rows by the same function."""
    cases, bounds = {}, of_documents(BOUNDS["short"])[2]
    for construction in set(CONSTRUCTIONS) - set(FUSED):
        inputs = mixer_inputs(LENGTH, construction, batch=1, heads=2)
        options = {"construction": construction, "return_final_state": True}
        cases[construction] = Case("mru_mixer", inputs, bounds, options, functools.partial(mru_mixer, **options))
    return cases


def one_by_one(cu_seqlens=None, initial_state=None, *, gated, **inputs) -> tuple[Tensor, Tensor]:
    """Outputs, and the last states of rows or documents, token by token in float64."""
    inputs = {name: x.double() for name, x in inputs.items()}
    batch, length, heads = inputs["k"].shape[:3]
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = inputs["k"].new_zeros(batch, heads, KEYS, VALUES)
        if initial_state is not None:
            state = initial_state.double() if cu_seqlens is None else initial_state.double()[number : number + 1]
        for t in range(start, end):
            now = {name: x[:, t] for name, x in inputs.items()}
            if gated:
                decay, written = now["log_decay"].exp()[..., None], now["beta"][..., None] * now["k"]
                y, state = delta_rule_step(state, decay, now["k"], -decay * written, written, now["v"], now["q"])
            else:
                tokens = (now[name] for name in ("a", "b", "k", "v", "r"))
                y, state = delta_rule_step(state, now["log_decay"].exp(), *tokens)
            outputs.append(y)
        states.append(state)
    return torch.stack(outputs, 1), torch.cat(states)


def delta_rules() -> dict[str, Case]:
    cases = {}
    for (name, bounds), gated in itertools.product(BOUNDS.items(), (True, False)):
        batch, rows, cu_seqlens = of_documents(bounds)
        a, b, q, k = torch.randn(4, batch, LENGTH, HEADS, KEYS).unbind(0)
        inputs = {"k": unit_vectors(k), "v": torch.randn(batch, LENGTH, HEADS, VALUES)}
        decay = -torch.rand(batch, LENGTH, HEADS, *([] if gated else [KEYS])) / 9
        if gated:
            inputs |= {"q": q, "beta": torch.rand(batch, LENGTH, HEADS), "log_decay": decay}
        else:
            a = unit_vectors(a)
            inputs |= {"r": q, "a": a, "b": -a * b.sigmoid(), "log_decay": decay}
        if name in ("rows", "short"):
            inputs["initial_state"] = torch.randn(rows, HEADS, KEYS, VALUES)
        wanted = functools.partial(one_by_one, gated=gated)
        for chunk in (4, 64) if name == "off" else (4,):
            options = {"gated": gated, "chunk_size": chunk}
            case = Case(product_scenario.delta_rule, inputs, cu_seqlens, options, wanted)
            cases[f"{name}, {gated}, chunks of {chunk}"] = case
    return cases


@pytest.mark.parametrize("ranks", [nightly(2), nightly(3), 4])
def test_parts_are_parts_of_the_whole(ranks):
    cases = products() | mixers() | other_mixers() | delta_rules()
    check_parts({label: typed(case, torch.float64) for label, case in cases.items()}, ranks, 1e-12)


@pytest.mark.slow
def test_float32():
    check_parts(products() | mixers() | delta_rules(), 3, 1e-5)


@pytest.mark.parametrize("ranks", [nightly(2), 3])
def test_log_norms_are_those_of_all_parts(ranks):
    for seen in run_distributed(product_scenario.log_norms, ranks):
        for whole, part in zip(seen[::2], seen[1::2], strict=True):
            assert part == pytest.approx(whole, rel=1e-6)


def test_as_much_is_sent_whatever_the_length():
    """An MRU of 4 heads of order 4, whose affine maps are half the identity; 2 heads of 4 keys and 8 values; and of 8
    and 8."""
    names = ["mru", "gated_delta", "rwkv7"]
    for rank, sent in enumerate(run_distributed(mixer_parts_scenario.bytes_sent, 2, arguments=(names, [256, 1024]))):
        assert all(sent[name, 256] == sent[name, 1024] for name in names)
        gathered = {name: [size for kind, size in sent[name, 256] if kind != "batch_isend_irecv"] for name in names}
        half, flag = 4 * 4 * 2 * 4, 4
        assert gathered["mru"] == [half + flag, 2 * half + flag]
        # Backward goes what is a gradient of each rank's.
        assert gathered["gated_delta"] == [4 * 2 * 4 * (8 + 4), 2 * 4 * 2 * 4 * (8 + 4)]
        assert gathered["rwkv7"] == [4 * 2 * 8 * (8 + 8), 2 * 4 * 2 * 8 * (8 + 8)]
        # The three tokens before the part, once more in the backward pass, and back their gradients.
        rows = [size for kind, size in sent["mru", 256] if kind == "batch_isend_irecv"]
        assert rows == ([3 * 4 * 16, 3 * 4 * 16, 0] if rank == 0 else [0, 0, 3 * 4 * 16])
