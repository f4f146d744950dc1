"""Delta rules over parts of rows, on all ranks."""

import functools
import itertools

import torch
from context_scenario import world
from parts import part_errors
from product_scenario import BOUNDS, LENGTH, summed

from matmix.model.mixers.scans.delta_rule import delta_rule_step, diagonal_delta_rule, gated_delta_rule, unit_vectors

HEADS, KEYS, VALUES = 2, 5, 3


def one_by_one(cu_seqlens=None, initial_state=None, *, gated, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the last states of rows or documents, token by token."""
    batch, length, heads = inputs["k"].shape[:3]
    zeros = inputs["k"].new_zeros(batch, heads, KEYS, VALUES)
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = zeros if initial_state is None else initial_state
        if cu_seqlens is not None and initial_state is not None:
            state = initial_state[number : number + 1]
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


def in_chunks(chunk_size, cu_seqlens=None, initial_state=None, context=None, *, gated, **inputs):
    rule, names = (gated_delta_rule, "q k v beta") if gated else (diagonal_delta_rule, "r k v a b")
    arguments = tuple(inputs[name] for name in (*names.split(), "log_decay"))
    return rule(arguments, chunk_size, initial_state, cu_seqlens, context)


def rules(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Errors by case."""
    errors = {}
    for (name, bounds), gated in itertools.product(BOUNDS.items(), (True, False)):
        torch.manual_seed(2)
        batch = 2 if bounds is None else 1
        a, b, q, k = torch.randn(4, batch, LENGTH, HEADS, KEYS).unbind(0)
        inputs = {"k": unit_vectors(k), "v": torch.randn(batch, LENGTH, HEADS, VALUES)}
        if gated:
            inputs |= {
                "q": q,
                "beta": torch.rand(batch, LENGTH, HEADS),
                "log_decay": -torch.rand(batch, LENGTH, HEADS) / 9,
            }
        else:
            a = unit_vectors(a)
            inputs |= {"r": q, "a": a, "b": -a * b.sigmoid(), "log_decay": -torch.rand(batch, LENGTH, HEADS, KEYS) / 9}
        if name in ("rows", "short"):
            inputs["initial_state"] = torch.randn(batch if bounds is None else len(bounds) - 1, HEADS, KEYS, VALUES)
        for chunk in (4, 64) if name == "off" else (4,):
            compared = functools.partial(
                part_errors, world(), functools.partial(in_chunks, chunk), one_by_one, inputs, summed, bounds=bounds,
                dtype=dtype, all_documents=chunk == 4, gated=gated,
            )  # fmt: skip
            errors[f"{name}, {gated}, chunks of {chunk}"] = compared()
        for document in (1, 4, 5) if name == "short" else ():
            errors[f"{name}, {gated}, NaN in {document}"] = compared(spoilt=document)
    return errors
