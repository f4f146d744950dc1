"""Inputs of the MRU mixer whose products of state matrices stay bounded."""

from __future__ import annotations

import torch

from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, element_columns, state_elements

FUSED = ("affine", "identity_plus", "ldu", "cayley")


def mixer_inputs(
    seqlen, construction, *, batch=2, heads=3, order=4, width=None, states=0, d_chunk=0
) -> dict[str, torch.Tensor]:
    """elements (with `d_chunk` chunks and w_up, and w_down as wide unless `width` is given), w_down and with `states`
    an initial state per row or document: small elements, but for orthogonal matrices."""
    size = 0.7 if construction in BOUNDED_CONSTRUCTIONS else 0.3 / max(seqlen, 16) ** 0.5
    inputs = {
        "elements": torch.randn(batch, seqlen, heads, state_elements(construction, order)) * size,
        "w_down": torch.randn(heads, order, width or d_chunk or order) * order**-0.5,
    }
    if d_chunk:
        inputs["elements"] = torch.randn(batch, seqlen, heads, order, d_chunk)
        inputs["w_up"] = torch.randn(heads, d_chunk, element_columns(construction, order)) * size * d_chunk**-0.5
    if states:
        inputs["initial_state"] = torch.randn(states, heads, order, order)
    return inputs
