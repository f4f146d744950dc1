"""The published LION attention layer (timm-style, as in the authors' vision transformer): constructor arguments,
parameter names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from matmix.model.images.config import ImageConfig
from matmix.model.images.scans import scan_orders
from matmix.model.interop.importing.layouts import ForeignConfig, Layout
from matmix.model.mixers.scans.lion import LionConfig, LionD, LionLit, LionS
from matmix.model.mixers.scans.lion_forms import delayed_gates

# Dropout is off in eval mode; chunks change speed; the number of patches is read off the input.
_WITHOUT_EFFECT = frozenset({"attn_drop", "proj_drop", "chunk_size", "num_patches"})

_FORMS = {"Attention": "attention", "RNN": "recurrent", "Chunk": "chunked"}
_EPS = 1e-6
_NO_EPS = 1e-30  # of no consequence beside a row sum, but 0 / 0 is still 0
_OPEN = 1e4  # the logit of a gate of exactly 1


class PublishedOrder:
    """Before a LION mixer: reads tokens as they stand, or (`snake`) as the authors' order "S" does: a class token
    first, then the patches of a square, row by row and column by column with every second one backwards."""

    snake = False

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        if not self.snake:
            return super().forward(x, cu_seqlens, max_seqlen)
        if cu_seqlens is not None:
            raise ValueError('lion-attention: order = "S" reads one image a row; give no cu_seqlens')
        return self.forward_in_orders(x, published_snake(x))

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix_in_orders(x, published_snake(x)) if self.snake else super().matrix(x)


def published_snake(x: torch.Tensor) -> Any:
    """The two orders of x (B, 1 + side * side, d_model). Raises ValueError for another number of positions."""
    side = math.isqrt(x.shape[1] - 1)
    if side < 1 or side**2 != x.shape[1] - 1:
        raise ValueError(
            f'lion-attention: order = "S" reads a class token and the patches of a square, not {x.shape[1]} positions'
        )
    return scan_orders(ImageConfig(size=side, patch=1, class_token="first", scan="snake"), side, side, x.device)


class PublishedLionS(LionS):
    """LION-S as the authors' vision code has it: the gate is 1 - sigmoid(a_i(x)), and the first token, which is a class
    token there, has a gate of 1.

    Nothing is learned through the gates: that code makes its masks from a detached copy of a_i(x). So a_i has no
    gradient, and that of x has no part that comes through them. Training this layer leaves a_i as it was read; the
    mixer lion_s learns it.
    """

    def gate_logits(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, which: int = 0) -> torch.Tensor:
        logits = -super().gate_logits(x, cu_seqlens, which).detach()
        inside = delayed_gates(torch.ones_like(logits), 1, cu_seqlens)
        return logits.masked_fill(inside == 0, _OPEN)


def lion_attention_layout(
    state: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> tuple[type[LionLit], int, LionConfig, bool, Layout]:
    """Class, width, options, whether it reads in order "S", and names of a layer (kind lion-attention) from its
    constructor arguments.

    Without a mask_type, the state tells: a_i is absent (Lit), a vector (Decay) or a Linear (Selective). Layers of
    order "S" have another a2_i, for the second of its two orders; those without gates give the same in any order.
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
    if order not in ("Normal", "S"):
        raise ValueError(f"{kind}: order = {order!r}; known: Normal, S")
    snake = order == "S" and mask_type != "Lit"
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
    if snake:
        options["gate_sets"] = 2
        names += [name.replace("a_i", "a2_i") for name in names if name.startswith("a_i")]
    return mixer, dim, mixer.Config(**options), snake, Layout(kind=kind, names={name: name for name in names})
