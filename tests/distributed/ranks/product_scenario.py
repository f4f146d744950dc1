"""The MRU and delta rules over parts of rows, on all ranks."""

import torch
from context_scenario import world
from mixer_parts_scenario import bounds_of_part
from mru_inputs import mixer_inputs

from matmix.kernels import mru_mixer
from matmix.model.mixers.scans.delta_rule import diagonal_delta_rule, gated_delta_rule


def delta_rule(cu_seqlens=None, initial_state=None, context=None, *, gated, chunk_size, **inputs):
    """A rule with its tensors by name."""
    rule, names = (gated_delta_rule, "q k v beta") if gated else (diagonal_delta_rule, "r k v a b")
    arguments = tuple(inputs[name] for name in (*names.split(), "log_decay"))
    return rule(arguments, chunk_size, initial_state, cu_seqlens, context)


def log_norms() -> list[list[float]]:
    """For each form the largest and the mean log-norm as the ranks see them, and as one does that has the whole row."""
    context, seen = world(), []
    bounds = torch.tensor([0, 30, 190, 191, 384], dtype=torch.int32)
    inputs = mixer_inputs(384, "identity_plus", batch=1, heads=2)
    inputs["elements"] *= 4
    part = inputs["elements"].chunk(context.size, 1)[context.rank]
    own = bounds_of_part(bounds, part.shape[1], context.rank)
    options = {"construction": "identity_plus", "return_log_norms": True}
    for backend in ("auto", "torch"):
        options["backend"] = backend
        _, whole = mru_mixer(**inputs, cu_seqlens=bounds, **options)
        _, here = mru_mixer(part, inputs["w_down"], cu_seqlens=own, context=context, **options)
        seen += [whole.tolist(), here.tolist()]
    return seen
