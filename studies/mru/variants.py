"""The variants that the study compares: named overrides of one small model, at equal parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.model.build import count_parameters
from matmix.model.config import NO_MIXER
from matmix.train.config import RunConfig
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.recipe import config_from_dict, merged
from matmix.train.recipe_files import read_toml

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""Learning rates, the same for all."""

FIRST_FORM_SCALE = 0.08
"""element_scale of mru-lm's first form for each head, of which there is one here."""


RULE = {"match": "*.in_proj.weight", "lr": (2 / 64) ** 0.5 / 8, "clip": (64 / 2) ** 0.5}
"""mru-lm's, at this length and order."""


def mru(construction: str, *, rule: bool = False, **options: Any) -> dict[str, Any]:
    """Overrides of an MRU with these options; rule: whether its dense elements are trained by mru-lm's rule."""
    model = {"layers": ["mru"], "mixers": {"mru": {"construction": construction, **options}}}
    return {"model": model, "optimizer": {"mixer_rules": False, "rule": [RULE] if rule else []}}


def peer(name: str, **options: Any) -> dict[str, Any]:
    return {"model": {"layers": [name], "mixers": {name: options}}}


def _forms(construction: str) -> dict[str, dict[str, Any]]:
    """Returns the four forms that every construction is tried in."""
    return {
        f"{construction}, chunked": mru(construction, input="chunked"),
        f"{construction}, chunked, gate and shift": mru(construction, input="chunked", gate="silu", shift="blend"),
        f"{construction}, dense, rule": mru(construction, input="dense", rule=True),
        f"{construction}, dense, no rule": mru(construction, input="dense"),
    }


NONE = "no mixer"
ATTENTION = "attention"

FIRST_FORM = {"input": "chunked", "output_std": 0.02 / 2**0.5}  # by the number of blocks, of which there are two
GATED_LARGE = {"input": "chunked", "gate": "silu", "shift": "blend", "element_scale": 10 * FIRST_FORM_SCALE}

MRU_VARIANTS: dict[str, dict[str, Any]] = {
    **{name: overrides for construction in CONSTRUCTIONS for name, overrides in _forms(construction).items()},
    "plain, chunked": mru("plain"),
    "affine, chunked, gate": mru("affine", input="chunked", gate="silu"),
    "affine, chunked, shift": mru("affine", input="chunked", shift="blend"),
    # mru-lm's first form as it was published, and with larger elements.
    "identity_plus, chunked": mru("identity_plus", **FIRST_FORM),
    "identity_plus, chunked, elements x 3": mru("identity_plus", **FIRST_FORM, element_scale=3 * FIRST_FORM_SCALE),
    "identity_plus, chunked, elements x 10": mru("identity_plus", **FIRST_FORM, element_scale=10 * FIRST_FORM_SCALE),
    **{
        f"{construction}, chunked, gate and shift, elements x 10": mru(construction, **GATED_LARGE)
        for construction in CONSTRUCTIONS
        if construction != "affine"  # which has such elements by itself
    },
    # A learned factor below 1 for each head, the simplest way to keep products of these from growing.
    **{
        f"{construction}, chunked, gate and shift, elements x 10, damped": mru(construction, **GATED_LARGE, decay=True)
        for construction in ("identity_plus", "ldu")
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    NONE: {"model": {"layers": [NO_MIXER]}},
    "convolution only": peer("convolution"),
    ATTENTION: peer("attention", headdim=16),
    "SSD": peer("semiseparable", headdim=16, d_state=32),
    "RetNet": peer("retnet", headdim=16),
    "gated delta rule": peer("gated_delta", headdim=32, qk_dim=24),
    "RWKV-7": peer("rwkv7", headdim=32),
    **MRU_VARIANTS,
}
"""Name -> overrides."""


def configs(data: str, overrides: Mapping[str, Any]) -> dict[str, RunConfig]:
    """Returns variant -> its config on a dataset, but for learning rate, seed and run directory, all with as many
    parameters as attention.

    overrides: put into all, such as other steps. Raises FileNotFoundError and ValueError (one line) for data that
    cannot be read, and for a variant that cannot have so many parameters.
    """
    values = merged(merged(read_toml(Path(__file__).with_name("base.toml")), {"data": {"path": data}}), overrides)
    known = {name: config_from_dict(merged(values, changes), f'variant "{name}"') for name, changes in VARIANTS.items()}
    with contextlib.closing(make_loader(known[ATTENTION], "train", 0, 1)) as loader:
        known = {name: with_data_facts(config, loader) for name, config in known.items()}
    target = count_parameters(known[ATTENTION].model)
    return {name: equalised(name, config, target) for name, config in known.items()}


def equalised(name: str, config: RunConfig, target: int) -> RunConfig:
    """Returns `config` with the width of the MLPs that brings its model next to `target` parameters."""
    model = config.model
    each = 2 * model.d_model * model.n_layers  # parameters for one more unit in every MLP
    hidden = round(model.d_model * model.mlp_ratio) + round((target - count_parameters(model)) / each)
    if hidden < 1:
        raise ValueError(f'variant "{name}": its mixers alone have more than {target:,} parameters')
    return dataclasses.replace(config, model=dataclasses.replace(model, mlp_ratio=hidden / model.d_model))
