"""Every registered mixer in every form it has, small: what the proofs of tests/model/mixers/test_mixers.py run over.

A mixer is covered by being registered. Options beyond the defaults are listed in VARIANTS.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from matmix.model.initialization import initialize
from matmix.model.mixers import MIXERS
from matmix.model.mixers.base import Mixer

D_MODEL = 16
SMALL = {"headdim": 8, "d_state": 4, "qk_dim": 4, "order": 4, "window": 2, "rank": 4, "landmarks": 4, "columns": 4}
SMALL |= {"rounds": 2, "buckets": 4, "chunk": 4, "products": 2}
"""Options that get small values wherever a mixer has them."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra-groups": ("hydra", {"headdim": 4, "d_state": 3, "ngroups": 4, "expand": 1, "d_conv": 3, "bias": True}),
    "hydra-limited-steps": (
        "hydra",
        {"conv_bias": False, "dt_min": 0.65, "dt_max": 0.75, "dt_limit_low": 0.6, "dt_limit_high": 0.8},
    ),
    "mru-ldu": ("mru", {"construction": "ldu"}),
    "mru-bias": ("mru", {"construction": "cayley", "bias": True}),
    "mru-identity-wide": ("mru", {"nheads": 4, "construction": "identity_plus"}),
    "mru-narrow": ("mru", {"nheads": 1, "construction": "ldu"}),
    "mru-householder": ("mru", {"construction": "householder"}),
    "mru-newton-schulz": ("mru", {"construction": "ldu_newton_schulz", "scan": "sequential"}),
    "mru-near-orthogonal": ("mru", {"construction": "newton_schulz", "element_std": 0.5}),
    "mru-plain": ("mru", {"construction": "plain", "scan": "brent_kung"}),
    "mru-chunked": ("mru", {"input": "chunked", "construction": "identity_plus", "element_scale": 0.5}),
    "mru-chunked-cayley": ("mru", {"input": "chunked", "nheads": 2, "order": 2, "output_scale": 2.0, "bias": True}),
    "mru-blended": ("mru", {"shift": "blend"}),
    "matrix_memory-narrow": ("matrix_memory", {"headdim": 4, "d_state": 3, "expand": 1, "d_conv": 3, "bias": True}),
    "matrix_memory-normed": ("matrix_memory", {"norm": True, "products": 0}),
    "mru-convolution-alone": ("mru", {"shift": "conv", "d_conv": 3, "construction": "identity_plus"}),
    "mru-padded": ("mru", {"order": 2, "nheads": 8, "construction": "qr", "decay": True}),
    "attention-wide": ("attention", {"value_headdim": 4, "nheads": 3, "bias": True}),
    "attention-xpos": ("attention", {"position": "xpos"}),
    "attention-without-positions": ("attention", {"position": "none"}),
    "attention-shared-keys": ("attention", {"nheads": 6, "kv_heads": 2, "qk_norm": True}),
    "local_attention-shared-keys": ("local_attention", {"headdim": 4, "kv_heads": 1, "qk_norm": True, "window": 5}),
    "gated_delta-without-gate": ("gated_delta", {"gate": False, "expand": 2, "bias": True}),
    "convolution-bare": (
        "convolution",
        {"d_conv": 5, "expand": 1, "project": False, "norm": False, "bias": True, "conv_bias": False},
    ),
    "hyena-residual": ("hyena", {"residual": True}),
    "s4d-inverse": ("s4d", {"spectrum": "inv"}),
    "mlp_mixer-without-biases": ("mlp_mixer", {"bias": False}),
    "m2-tokens-alone": ("m2", {"mix_channels": False}),
    "linformer-shared": ("linformer", {"nheads": 3, "share_kv": True, "bias": True}),
    "fnet-published": ("fnet", {"scale": "none"}),
    "butterfly-kaleidoscope": ("butterfly", {"kaleidoscope": 2}),
    "toeplitz_di-published": ("toeplitz_di", {"offset": "published"}),
    "toeplitz_dd-published": ("toeplitz_dd", {"offset": "published"}),
    "cauchy_dd-difference": ("cauchy_dd", {"denominator": "difference"}),
    "vandermonde_dd-turns": ("vandermonde_dd", {"eps": 0.1}),
    "vandermonde_dd-power": ("vandermonde_dd", {"angle": "power"}),
    "vandermonde_di-sum": ("vandermonde_di", {"eps": 1.0, "combination": "sum"}),
    "quasiseparable_dd-elementwise": ("quasiseparable_dd", {"formula": "elementwise"}),
    "quasiseparable_dd-full": ("quasiseparable_dd", {"formula": "elementwise", "transition": "full"}),
    "quasiseparable_dd-elementwise-c_j": ("quasiseparable_dd", {"formula": "elementwise", "above": "c_j"}),
    "quasiseparable_dd-full-c_j": (
        "quasiseparable_dd",
        {"formula": "elementwise", "transition": "full", "above": "c_j"},
    ),
    "two_ssms-multiplied": ("two_ssms", {"joined": "mult"}),
    "two_ssms-concatenated": ("two_ssms", {"joined": "concat", "bias": True}),
    "lion_s-published-gates": ("lion_s", {"gate_offset": 0, "forward_gate_offset": 1, "qkv_bias": True}),
    "lion_d-wide": ("lion_d", {"nheads": 3}),
    "lion_lit-attention": ("lion_lit", {"form": "attention"}),
    "sma_causal-quadratic": ("sma_causal", {"contraction": "quadratic"}),
    "sma_semiseparable-associative": ("sma_semiseparable", {"contraction": "associative"}),
    # The lengths that costs are counted at fill the last level of such a tree alike.
    "sma_graph-tree": ("sma_graph", {"graph": "tree", "branches": 4}),
    "linear_attention-performer": (
        "linear_attention",
        {"headdim": 16, "feature_map": "performer", "random_features": 24},
    ),
    "lion_d-performer": ("lion_d", {"headdim": 16, "feature_map": "performer", "random_features": 24}),
    "linear_attention-rfa": ("linear_attention", {"headdim": 16, "feature_map": "rfa", "random_features": 64}),
    "lion_d-rfa": ("lion_d", {"headdim": 16, "feature_map": "rfa", "random_features": 64}),
    "linear_attention-cosformer": ("linear_attention", {"headdim": 16, "feature_map": "cosformer", "reach": 5000}),
    "lion_d-cosformer": ("lion_d", {"headdim": 16, "feature_map": "cosformer", "reach": 5000}),
    "linear_attention-polynomial": ("linear_attention", {"headdim": 16, "feature_map": "polynomial"}),
    "lion_d-polynomial": ("lion_d", {"headdim": 16, "feature_map": "polynomial"}),
    "linear_attention-taylor": ("linear_attention", {"headdim": 16, "feature_map": "taylor"}),
    "lion_d-taylor": ("lion_d", {"headdim": 16, "feature_map": "taylor"}),
}
"""Name of a case -> (mixer, options)."""

COMPLEXITIES = {"lion_lit-attention": "O(L^2)", "sma_causal-quadratic": "O(L^2)"}
"""Of the variants whose cost does not grow as that of the mixer's default form."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One mixer in one form."""

    mixer: str
    config: Any
    causal: bool
    complexity: str

    @property
    def kind(self) -> type[Mixer]:
        return MIXERS[self.mixer]

    def build(self, *, max_seqlen: int = 8, device: str = "cpu") -> Mixer:
        """The mixer with its initial weights, in float32 and eval mode."""
        self.kind.check(D_MODEL, self.config)
        with torch.device("meta"):
            mixer = self.kind(D_MODEL, self.config, causal=self.causal, max_seqlen=max_seqlen, output_std=0.02)
        if device == "cpu":
            initialize(mixer.to_empty(device="cpu"), seed=0)
        return mixer.eval()


def small_config(mixer: str, **options: Any) -> Any:
    """Options of a mixer with small sizes."""
    kind = MIXERS[mixer].Config
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in SMALL.items() if name in known} | options)


def all_cases() -> dict[str, Case]:
    """Name -> case: each mixer, causal and not as far as it has these forms, and the variants."""
    cases = {}
    for name, (mixer, options) in {**{mixer: (mixer, {}) for mixer in MIXERS}, **VARIANTS}.items():
        config, kind = small_config(mixer, **options), MIXERS[mixer]
        complexity = COMPLEXITIES.get(name, kind.complexity)
        if kind.bidirectional_form:
            cases[name] = Case(mixer, config, False, complexity)
        if kind.causal_form:
            cases[name if not kind.bidirectional_form else f"{name}-causal"] = Case(mixer, config, True, complexity)
    return cases


CASES = all_cases()
