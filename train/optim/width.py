"""Maximal update parametrization (muP, arXiv 2203.03466, table 8) as factors on rates and initial values, with which a
wide model learns best at about the rate at which a narrow one does."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from matmix.model import ModelConfig, build_model
from matmix.model.backbone import Backbone
from matmix.model.build import at_width
from matmix.model.initialization import init_rules_of
from matmix.model.mixers import Mixer
from matmix.model.mixers.structured.channels import ChannelMap


@dataclasses.dataclass(frozen=True, slots=True)
class WidthFactors:
    """What a parameter differs by from the one of the model of the base width."""

    lr: float = 1.0
    """Factor on the learning rate; weight decay is divided by it, so that a step shrinks weights as there."""
    init: float = 1.0
    """Factor on the initial values."""


def width_factors(config: ModelConfig, base_width: int) -> dict[str, WidthFactors]:
    """Returns the factors of each parameter of a model for which one of them is not 1, relative to the same model with
    d_model = base_width, and heads of another size where its own do not fit that; none where base_width is 0 or the
    width.

    Of a matrix with r times as many inputs: rate 1 / r, initial values of 1 / sqrt(r) the size; of the readout, whose
    outputs are as many at any width, 1 / r and 1 / r, which is the factor 1 / r on the logits. The norm before a
    readout that is tied to an embedding has this factor in its place. All others, embeddings, vectors and convolutions,
    are as in the base model. Raises ValueError (one line) for a model that cannot be of the base width, or whose
    readout is tied with no norm before it.
    """
    if base_width in (0, config.d_model):
        return {}
    try:
        at_base = at_width(config, base_width) or dataclasses.replace(config, d_model=base_width)
        base = build_model(at_base, device="meta")
    except ValueError as error:
        raise ValueError(f"optimizer.mup_base_width = {base_width}: no model has this width: {error}") from None
    own = build_model(config, device="meta")
    sums, theirs, there = _sums(own), _sums(base), dict(base.named_parameters())
    rules, base_rules = init_rules_of(own), init_rules_of(base)
    readout_norm = _readout_norm(base, base_width)
    factors = {}
    for name, parameter in own.named_parameters():
        if readout_norm and name.startswith(f"{readout_norm}."):
            found = WidthFactors(base_width / config.d_model, base_width / config.d_model)
        else:
            (terms, scale), (base_terms, base_scale) = sums.get(name, (1, 1)), theirs.get(name, (1, 1))
            rate = base_terms / terms * (base_scale / scale)
            is_readout = not name.startswith("blocks.") and parameter.shape[:1] == there[name].shape[:1]
            size = base_terms / terms if is_readout else math.sqrt(base_terms / terms)
            drawn, base_drawn = _spread(rules[name]), _spread(base_rules[name])
            found = WidthFactors(rate, base_drawn / drawn * size * (base_scale / scale))
        if found != WidthFactors():
            factors[name] = found
    return factors


def initial_factors(config: ModelConfig, base_width: int) -> Mapping[str, float]:
    """Returns the factors of `width_factors` on initial values, where they are not 1."""
    return {name: own.init for name, own in width_factors(config, base_width).items() if own.init != 1}


def _sums(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Returns of each parameter that stands in a linear map the terms in a sum over its inputs, and a factor on it."""
    found: dict[str, tuple[float, float]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[f"{prefix}.weight"] = (module.in_features, 1.0)
        if isinstance(module, (Mixer, ChannelMap)):
            found |= {f"{prefix}.{name}": sums for name, sums in module.sums().items()}
    return found


def _readout_norm(model: Backbone, base_width: int) -> str | None:
    """Returns the name of the norm before a readout that is tied to an embedding; None where none is tied."""
    weight, _ = model.output_projection()
    tied = any(isinstance(module, nn.Embedding) and module.weight is weight for module in model.modules())
    if not (tied or (model.strands > 1 and model.config.tie_embeddings)):
        return None
    if model.readout_norm is None or isinstance(model.get_submodule(model.readout_norm), nn.Identity):
        raise ValueError(
            f"optimizer.mup_base_width = {base_width}: no norm stands between the layers and a readout that is tied to "
            "the embeddings, to hold the factor of the logits; set model.tie_embeddings = false"
        )
    return model.readout_norm


def _spread(rule: Any) -> float:
    """Returns the standard deviation or bound that an initial value is drawn with; 1 where it has another rule."""
    drawn = getattr(rule, "keywords", {})
    return drawn.get("std") or drawn.get("bound") or 1.0
