"""The published LION attention layer (timm-style, as in the authors' vision transformer): constructor arguments,
parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from matmix.model.interop.importing.layouts import ForeignConfig, Layout
from matmix.model.mixers.scans.lion import LionConfig, LionD, LionLit, LionS
from matmix.model.mixers.scans.lion_forms import delayed_gates

# Dropout is off in eval mode; the others change speed, or matter for other orders of the tokens only.
_WITHOUT_EFFECT = frozenset({"attn_drop", "proj_drop", "chunk_size", "num_patches"})

_FORMS = {"Attention": "attention", "RNN": "recurrent", "Chunk": "chunked"}
_EPS = 1e-6
_NO_EPS = 1e-30  # of no consequence beside a row sum, but 0 / 0 is still 0


class PublishedLionS(LionS):
    """LION-S as the authors' vision code has it: the gate is 1 - sigmoid(a_i(x)), and the first token, which is a class
    token there, has a gate of 1.

    Nothing is learned through the gates: that code makes its masks from a detached copy of a_i(x). So a_i has no
    gradient, and that of x has no part that comes through them. Training this layer leaves a_i as it was read; the
    mixer lion_s learns it.
    """

    def log_gates(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        gates = F.logsigmoid(-self.gate_logits(x)).detach()
        inside = delayed_gates(torch.ones_like(gates), 1, cu_seqlens)
        return gates.masked_fill(inside == 0, 0)


def lion_attention_layout(
    state: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> tuple[type[LionLit], int, LionConfig, Layout]:
    """Class, width, options and names of a layer (kind lion-attention) from its constructor arguments.

    Without a mask_type, the state tells: a_i is absent (Lit), a vector (Decay) or a Linear (Selective). Of the
    arguments, order is read as "Normal" (or None) only: order = "S", which has one more parameter (a2_i), is not
    supported and refused.
    """
    kind = "lion-attention"
    config = ForeignConfig(kind, values)
    dim, nheads = config.require("dim", int), config.get("num_heads", 8)
    if nheads < 1 or dim % nheads:
        raise ValueError(f"{kind}: num_heads = {nheads} does not divide dim = {dim}")
    headdim = dim // nheads
    present = "Decay" if "a_i" in state else "Selective" if "a_i.weight" in state else "Lit"
    mask_type, form = config.get("mask_type", present), config.get("format", "Attention")
    for name, value, known in (("mask_type", mask_type, ("Lit", "Decay", "Selective")), ("format", form, _FORMS)):
        if value not in known:
            raise ValueError(f"{kind}: {name} = {value!r}; known: {', '.join(known)}")
    order = config.get("order", "Normal")
    if order != "Normal":
        raise ValueError(f"{kind}: order = {order!r}; not supported, only tokens in their own order ('Normal') are")
    scale = config.get("qk_scale", 0.0) or headdim**-0.5
    options: dict[str, Any] = {
        "headdim": headdim,
        "nheads": nheads,
        "qkv_bias": config.get("qkv_bias", False),
        "form": _FORMS[form],
        # Scores are scaled before eps is added to their sums (format Attention), and only there: another scale is
        # another eps.
        "eps": _EPS * headdim**-0.5 / scale if form == "Attention" else _NO_EPS,
    }
    config.refuse_unknown(_WITHOUT_EFFECT)
    names = ["qkv.weight", "proj.weight", "proj.bias"] + ["qkv.bias"] * options["qkv_bias"]
    if mask_type == "Lit":
        mixer: type[LionLit] = LionLit
    elif mask_type == "Decay":
        mixer = LionD
        names.append("a_i")
    else:
        # The published mask: gates of j .. i-1 below the diagonal, of i+1 .. j above it.
        mixer = PublishedLionS
        options |= {"gate_offset": 1, "forward_gate_offset": 1}
        names += ["a_i.weight", "a_i.bias"]
    return mixer, dim, mixer.Config(**options), Layout(kind=kind, names={name: name for name in names})
