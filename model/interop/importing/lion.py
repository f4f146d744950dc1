"""The published LION attention layer (timm-style, as in the authors' vision transformer): constructor arguments,
parameter names."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from matmix.model.images.config import ImageConfig
from matmix.model.images.scans import scan_orders
from matmix.model.interop.importing.layouts import ForeignConfig, Layout
from matmix.model.mixers.scans.lion import LionD, LionLit, LionS, delayed_gates

# Dropout is off in eval mode; chunks change speed; the number of patches is read off the input.
_WITHOUT_EFFECT = ("attn_drop", "proj_drop", "chunk_size", "num_patches")

_FORMS = {"Attention": "attention", "RNN": "recurrent", "Chunk": "chunked"}
_EPS = 1e-6
_NO_EPS = 1e-30  # of no consequence beside a row sum, but 0 / 0 is still 0
_OPEN = 1e4  # the logit of a gate of exactly 1


class PublishedSnake:
    """Before a LION mixer: reads tokens in the authors' order "S", which is a class token first, then the patches of a
    square, row by row and column by column with every second one backwards."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        if cu_seqlens is not None:
            raise ValueError('lion-attention: order = "S" reads one image a row; give no cu_seqlens')
        return self.forward_in_orders(x, published_snake(x))

    def matrix(self, x: Tensor) -> Tensor:
        return self.matrix_in_orders(x, published_snake(x))


def published_snake(x: Tensor) -> Any:
    """Returns the two orders of x (B, 1 + side * side, d_model). Raises ValueError for another number of positions."""
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

    def gate_logits(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor:
        logits = -super().gate_logits(x, cu_seqlens, which).detach()
        inside = delayed_gates(torch.ones_like(logits), 1, cu_seqlens)
        return logits.masked_fill(inside == 0, _OPEN)


_MASKS: dict[str, tuple[type[LionLit], dict[str, Any]]] = {
    "Lit": (LionLit, {"feature_map": "elu"}),
    "Decay": (LionD, {}),
    # The published mask: gates of j .. i-1 below the diagonal, of i+1 .. j above it.
    "Selective": (PublishedLionS, {"gate_offset": 1, "forward_gate_offset": 1}),
}


def lion_attention_layout(state: Mapping[str, Tensor], values: Mapping[str, Any]) -> Layout:
    """Returns the layout of a layer (kind lion-attention) from its constructor arguments.

    Without a mask_type, the state tells: a_i is absent (Lit), a vector (Decay) or a Linear (Selective). Layers of
    order "S" have another a2_i, for the second of its two orders; those without gates give the same in any order.
    """
    config = ForeignConfig("lion-attention", values)
    dim, nheads = config.require("dim", int), config.get("num_heads", 8)
    if nheads < 1 or dim % nheads:
        raise ValueError(f"{config.kind}: num_heads = {nheads} does not divide dim = {dim}")
    present = "Decay" if "a_i" in state else "Selective" if "a_i.weight" in state else "Lit"
    mask_type = config.choice("mask_type", present, _MASKS)
    form = config.choice("format", "Attention", _FORMS)
    snake = config.choice("order", "Normal", ("Normal", "S")) == "S" and mask_type != "Lit"
    mixer, gates = _MASKS[mask_type]
    headdim = dim // nheads
    scale = config.get("qk_scale", 0.0) or headdim**-0.5
    options = mixer.Config(
        headdim=headdim,
        nheads=nheads,
        qkv_bias=config.get("qkv_bias", False),
        form=_FORMS[form],
        # Scores are scaled before eps is added to their sums (format Attention), and only there: another scale is
        # another eps.
        eps=_EPS * headdim**-0.5 / scale if form == "Attention" else _NO_EPS,
        **gates,
        **({"gate_sets": 2} if snake else {}),
    )
    config.refuse_unknown(_WITHOUT_EFFECT)
    return Layout.of_layer(config.kind, (PublishedSnake, mixer) if snake else (mixer,), dim, options)
