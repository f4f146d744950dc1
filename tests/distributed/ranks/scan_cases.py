"""Calls of scans over whole rows that ranks can share."""

from __future__ import annotations

import functools
import itertools

import torch
from parts_scenario import Case

from matmix.kernels.lion.definition import lion_mixer_definition
from matmix.kernels.scan_layer.definition import scan_layer_definition
from matmix.kernels.semiseparable.definition import quasiseparable_definition, semiseparable_definition

SEQLEN = 60
"""Cut by 2, 3 and 4 ranks."""
DOCUMENTS = {
    "rows": None,
    "one document": [60],
    "at thirds": [20, 20, 20],
    "at cuts": [15, 5, 10, 10, 5, 15],
    "over three ranks": [7, 46, 7],
    "single tokens": [1, 18, 1, 1, 8, 1, 15, 14, 1],
    "empty ones": [0, 30, 0, 0, 1, 29, 0],
}
KINDS = ["token", "head", "none", "gates that close"]
FORMS = {
    "hydra": {},
    "unshifted": {"shift": False},
    "halved": {"shift": False, "self_term": "mean"},
    "product": {"combine": "mult"},
    "unshifted product": {"combine": "mult", "shift": False},
    "both": {"combine": "concat"},
    "lion": {"shift": False, "self_term": "mean", "normalize": "row_sum", "gate_offset": 1, "eps": 0.2},
    "normalised": {"normalize": "row_sum", "eps": 0.5},
    "offset": {"gate_offset": 1},
}
"""Every option at least once."""


def draw(*shape: int, positive: bool = False) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.1 if positive else torch.randn(*shape, dtype=torch.float64)


def decays(kind: str, batch: int, seqlen: int, heads: int) -> torch.Tensor | None:
    steps = -0.3 * torch.rand(batch, seqlen, heads, dtype=torch.float64)
    if kind == "gates that close":
        return steps.masked_fill(torch.rand(batch, seqlen, heads) < 0.1, -torch.inf)
    return {"token": steps, "head": -0.1 * torch.rand(heads, dtype=torch.float64), "none": None}[kind]


def vectors(batch: int, seqlen: int, groups: int, d_state: int, names: list[str], positive: bool = False) -> dict:
    return {name: draw(batch, seqlen, groups, d_state, positive=positive) for name in names}


def packed(lengths: list[int] | None) -> torch.Tensor | None:
    return None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def causal(documents: str, kind: str = "token", states: bool = False, chunk: int = 16) -> Case:
    bounds = packed(DOCUMENTS[documents])
    batch, heads, groups, d_state, headdim = 2 if bounds is None else 1, 4, 2, 3, 5
    inputs = {"v": draw(batch, SEQLEN, heads, headdim)}
    inputs |= vectors(batch, SEQLEN, groups, d_state, ["q", "k"])
    inputs |= {"log_decay": decays(kind, batch, SEQLEN, heads), "input_scale": draw(batch, SEQLEN, heads)}
    inputs["diagonal"] = draw(heads) if kind == "head" else draw(batch, SEQLEN, heads)
    if states:
        inputs["initial_state"] = draw(batch if bounds is None else len(bounds) - 1, heads, d_state, headdim)
    options = {"return_final_state": states} | ({"log_decay": None} if kind == "none" else {})
    inputs = {name: x for name, x in inputs.items() if x is not None}
    wanted = functools.partial(semiseparable_definition, **options)
    return Case("semiseparable_scan", inputs, bounds, options | {"chunk_size": chunk}, wanted)


def two_sided(form: str, documents: str, kind: str = "token", states: bool = False, chunk: int = 16) -> Case:
    bounds, options = packed(DOCUMENTS[documents]), dict(FORMS[form])
    batch, heads, groups, d_state, headdim = 2 if bounds is None else 1, 4, 2, 3, 5
    positive = "normalize" in options
    names = ["q_forward", "k_forward", "q_backward", "k_backward"]
    inputs = {"v": draw(batch, SEQLEN, heads, headdim)} | vectors(batch, SEQLEN, groups, d_state, names, positive)
    for side in ("forward", "backward"):
        inputs[f"log_decay_{side}"] = decays(kind, batch, SEQLEN, heads)
        if side == "forward" or kind == "token":
            inputs[f"input_scale_{side}"] = draw(batch, SEQLEN, heads, positive=positive)
        if states:
            count = batch if bounds is None else len(bounds) - 1
            inputs[f"initial_state_{side}"] = draw(count, heads, d_state, headdim + positive, positive=positive)
    inputs["diagonal"] = draw(heads, positive=True) if kind == "head" else draw(batch, SEQLEN, heads, positive=True)
    if kind == "none":
        options |= {"log_decay_forward": None, "log_decay_backward": None}
    options["return_final_states"] = states
    inputs = {name: x for name, x in inputs.items() if x is not None}
    wanted = functools.partial(quasiseparable_definition, **options)
    return Case("quasiseparable_scan", inputs, bounds, options | {"chunk_size": chunk}, wanted)


def lion_layer(documents: str, forward_gate_offset: int = 0, gates: str = "token") -> Case:
    """Gates of either direction may be those of a neighbour's token. Sums of rows are returned of whole ones."""
    bounds = packed(DOCUMENTS[documents])
    batch = 2 if bounds is None else 1
    inputs = {"qkv": draw(batch, SEQLEN, 3 * 2 * 4), "gates": draw(batch, SEQLEN, 2) if gates == "token" else draw(2)}
    options = {"nheads": 2, "forward_gate_offset": forward_gate_offset, "return_row_sums": bounds is None}
    return Case("lion_mixer", inputs, bounds, options, functools.partial(lion_mixer_definition, **options))


def scan_layer(documents: str, states: bool = False, directions: int = 2) -> Case:
    """A layer of Hydra, or with one direction of Mamba-2. With states the convolution is computed again."""
    bounds, (heads, headdim, d_state) = packed(DOCUMENTS[documents]), (2, 6, 4)
    inner = heads * headdim
    channels = inner + 2 * directions * d_state
    shapes = {
        "projected": (2 if bounds is None else 1, SEQLEN, inner + channels + directions * heads),
        "conv_weight": (channels, 3 + directions), "dt_bias": (heads,), "A_log": (heads,), "norm_weight": (inner,),
        "D": (heads,),
    }  # fmt: skip
    if directions == 2:
        shapes |= {"conv_bias": (channels,), "diagonal_weight": (heads, inner)}
    if states:
        shapes["initial_states"] = (heads, headdim, d_state)
    inputs = {name: draw(*shape) for name, shape in shapes.items()}
    options = {"nheads": heads, "ngroups": 1, "d_state": d_state, "directions": directions}
    options |= {} if directions == 2 else {"conv_bias": None}
    wanted = functools.partial(scan_layer_definition, **options)
    return Case("scan_layer", inputs, bounds, options | {"recompute": states}, wanted)


def few_cases() -> dict[str, Case]:
    cases = {}
    for at, documents in enumerate(DOCUMENTS):
        cases[f"causal, {documents}"] = causal(documents, KINDS[at % 3], states=at % 2 == 1)
    for at, form in enumerate(FORMS):
        documents = list(DOCUMENTS)[at % len(DOCUMENTS)]
        cases[f"{form}, {documents}"] = two_sided(form, documents, KINDS[at % 3 if at < 3 else 0], states=at % 3 == 0)
    return cases


def all_cases(kind: str) -> dict[str, Case]:
    cases = {}
    for documents, states in itertools.product(DOCUMENTS, (False, True)):
        label = f"{documents}, {'with states' if states else 'without'}"
        cases[f"causal, {label}"] = causal(documents, kind, states)
        for form in FORMS:
            cases[f"{form}, {label}"] = two_sided(form, documents, kind, states, chunk=32 if states else 16)
    return cases


def typed(case: Case, dtype: torch.dtype) -> Case:
    """The call with inputs rounded to a type."""
    return case._replace(inputs={name: x.to(dtype) for name, x in case.inputs.items()})


def long_rows() -> Case:
    """Documents over parts of so many tokens that the kernels cut them into spans."""
    seqlen, bounds = 1120, packed([300, 810, 10])
    inputs = {"v": draw(1, seqlen, 1, 4)}
    inputs |= vectors(1, seqlen, 1, 3, ["q_forward", "k_forward", "q_backward", "k_backward"])
    for side in ("forward", "backward"):
        inputs |= {f"log_decay_{side}": 0.1 * decays("token", 1, seqlen, 1), f"input_scale_{side}": draw(1, seqlen, 1)}
    return Case("quasiseparable_scan", inputs, bounds, {"chunk_size": 16}, quasiseparable_definition)
