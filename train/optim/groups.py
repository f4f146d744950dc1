"""Makes the groups of parameters that are updated alike. Their rules come, in this order, from the shapes of the
parameters, from mixers for their own parameters, and from the recipe.

By their shapes matrices and embeddings are decayed, and vectors (norms, biases, rates) are not.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from matmix.model.parameter_rules import stated_rules
from matmix.train.optim import FALLBACK, Optimizer, optimizer_class
from matmix.train.optim.averaging import keep_average
from matmix.train.optim.base import OTHERS, SeveralOptimizers, full_shape
from matmix.train.optim.config import RULE, EmaConfig, OptimizerConfig, RuleConfig
from matmix.train.plugins import read_options


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters that are updated alike and clipped together."""

    names: tuple[str, ...]
    lr: float
    """Factor on the schedule's learning rate."""
    weight_decay: float
    clip_group: str
    """Groups with one name here are clipped together."""
    clip: float
    """To which norm; 0 = not at all."""
    optimizer: str
    """Name of the optimizer that updates them."""
    sources: tuple[str, ...]
    """Who states something of one of them: mixers by name, rules of the recipe by their patterns."""

    @property
    def has_rule(self) -> bool:
        """Whether rate or clipping are other than the run's."""
        return self.lr != 1 or self.clip_group != OTHERS


@dataclasses.dataclass(slots=True)
class _Treatment:
    """Of one parameter."""

    weight_decay: float | None  # None = the run's
    lr: float = 1.0
    clip: float | None = None  # None = with the others
    clipped_with: tuple[str, Any] = (OTHERS, None)  # what to call those it is clipped with, and what they share
    sources: tuple[str, ...] = ()
    decayed_by: str = ""  # the one of the sources that the weight decay is from
    optimizer: str | None = None  # None = the run's
    optimizer_by: str = ""  # the one of the sources that the optimizer is from

    def scale(self, source: str, factor: float) -> None:
        """Multiplies the factor on the learning rate."""
        if factor != 1:
            self.lr *= factor
            self.sources += (source,)

    def take(
        self,
        source: str,
        shared: tuple[str, Any],
        *,
        lr: float | None,
        clip: float | None,
        weight_decay: float | None,
        optimizer: str | None = None,
    ) -> None:
        """Takes over what is given. shared: as `clipped_with`, if there is a `clip`."""
        if lr is not None:
            self.lr = lr
        if clip is not None:
            self.clip, self.clipped_with = clip, shared
        if weight_decay is not None:
            self.weight_decay, self.decayed_by = weight_decay, source
        if optimizer is not None:
            self.optimizer, self.optimizer_by = optimizer, source
        if (lr, clip, weight_decay, optimizer) != (None, None, None, None):
            self.sources += (source,)


def parameter_groups(model: nn.Module, config: OptimizerConfig, seqlen: int) -> list[ParameterGroup]:
    """The groups of the trainable parameters of `model`, on the meta device, sharded or not.

    seqlen: length of the training sequences. Raises ValueError (one line) for a rule that matches nothing or cannot
    apply to what it matches.
    """
    shapes = {name: full_shape(p) for name, p in model.named_parameters() if p.requires_grad}
    found = {name: _Treatment(None if len(shape) >= 2 else 0.0) for name, shape in shapes.items()}
    for name, (owner, rule) in stated_rules(model, seqlen).items():
        if name in found:
            own = (rule.lr, rule.clip, rule.optimizer) if config.mixer_rules else (None, None, None)
            lr, clip, optimizer = own
            found[name].take(
                owner, (owner, rule), lr=lr, clip=clip, weight_decay=rule.weight_decay, optimizer=optimizer
            )
    if config.layer_decay != 1:
        for name, height in _heights(shapes).items():
            found[name].scale("optimizer.layer_decay", config.layer_decay**height)
    for number, own in enumerate(config.rule):
        for name in _matched(own, shapes):
            shared = (own.label, number)
            found[name].take(
                own.title, shared, lr=own.lr, clip=own.clip, weight_decay=own.weight_decay, optimizer=own.optimizer
            )
    for name in _frozen(config.freeze, shapes):
        # Without a rate nothing moves; clipped apart, their gradients do not scale those of the others.
        found[name].take("optimizer.freeze", ("frozen", None), lr=0.0, clip=math.inf, weight_decay=0.0)
    for name, treatment in found.items():
        if treatment.weight_decay and len(shapes[name]) < 2:
            raise ValueError(
                f"{treatment.decayed_by}: weight_decay = {treatment.weight_decay:g} cannot apply to {name}, a vector "
                f"of shape {tuple(shapes[name])}: only matrices are decayed; let its pattern match those alone"
            )
        if not optimizer_class(treatment.optimizer or config.name).takes(name, shapes[name]):
            if treatment.optimizer is not None:
                raise ValueError(
                    f"{treatment.optimizer_by}: the optimizer {treatment.optimizer} cannot update {name}, of shape "
                    f"{tuple(shapes[name])}; let its pattern match others"
                )
            treatment.optimizer = FALLBACK
    return _grouped(found, config)


def _heights(names: Iterable[str]) -> dict[str, int]:
    """How far below the output each parameter lies: those of the last layer 1, embeddings one more than the first."""
    layers = {name: int(found[1]) for name in names if (found := re.match(r"blocks\.(\d+)\.", name))}
    depth = 1 + max(layers.values(), default=-1)
    return {
        name: depth - layers[name] if name in layers else (depth + 1) * name.startswith("embedding") for name in names
    }


def _frozen(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that are not trained. Raises ValueError (one line) for a pattern that matches nothing."""
    for pattern in patterns:
        if not matches_any(pattern, names):
            near = ", ".join(_nearest(pattern, names))
            raise ValueError(f'optimizer.freeze: "{pattern}" matches no parameter of this model; the nearest: {near}')
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _matched(rule: RuleConfig, names: Iterable[str]) -> list[str]:
    """The names that a rule of the recipe is for, in their order."""
    for pattern in rule.patterns:
        if not matches_any(pattern, names):
            near = ", ".join(_nearest(pattern, names))
            raise ValueError(f'{RULE} "{pattern}" matches no parameter of this model; the nearest: {near}')
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.patterns)]


def matches_any(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern of a rule is for any of these parameters."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Up to three names of which a part looks like the pattern, the first one for each such part."""
    literal = pattern.strip("*.")
    width = literal.count(".") + 1
    parts: dict[str, str] = {}
    for name in names:
        words = name.split(".")
        for start in range(max(len(words) - width, 0) + 1):
            parts.setdefault(".".join(words[start : start + width]), name)
    return list(dict.fromkeys(parts[part] for part in difflib.get_close_matches(literal, parts, n=3, cutoff=0.0)))


def _grouped(found: Mapping[str, _Treatment], config: OptimizerConfig) -> list[ParameterGroup]:
    """Groups in order: what is treated by default, decayed and not, then the others as their parameters come."""
    labels = _labels(treatment.clipped_with for treatment in found.values())
    usual = (1.0, None, OTHERS, None, config.name), (1.0, 0.0, OTHERS, None, config.name)
    members: dict[tuple[float, float | None, str, float | None, str], list[str]] = {key: [] for key in usual}
    for name, own in found.items():
        key = (own.lr, own.weight_decay, labels[own.clipped_with], own.clip, own.optimizer or config.name)
        members.setdefault(key, []).append(name)
    return [
        ParameterGroup(
            names=tuple(names),
            lr=lr,
            weight_decay=config.weight_decay if weight_decay is None else weight_decay,
            clip_group=label,
            clip=config.max_grad_norm if clip is None else clip,
            optimizer=optimizer,
            sources=tuple(dict.fromkeys(source for name in names for source in found[name].sources)),
        )
        for (lr, weight_decay, label, clip, optimizer), names in members.items()
        if names
    ]


def _labels(shared: Iterable[tuple[str, Any]]) -> dict[tuple[str, Any], str]:
    """A name of its own for each set of parameters that are clipped together."""
    labels = {(OTHERS, None): OTHERS}
    for key in shared:
        if key not in labels:
            number, label = 1, key[0]
            while label in labels.values():
                number += 1
                label = f"{key[0]}-{number}"
            labels[key] = label
    return labels


def make_optimizer(model: nn.Module, config: OptimizerConfig, seqlen: int, ema: EmaConfig | None = None) -> Optimizer:
    """Makes the optimizer of the trainable parameters of `model`, sharded or not, with the average of them that `ema`
    asks for: the one that `config` names, or several as one where rules or shapes ask for others.

    Its groups say beside torch's options "lr_factor", for whoever sets "lr", "clip_group" and "clip", for the engine
    that clips, and "optimizer", the name of the one that updates them. Raises ValueError as `parameter_groups` does,
    and for a name or options that there are not.
    """
    parameters = dict(model.named_parameters())
    groups = [
        {
            "params": [(name, parameters[name]) for name in group.names],
            "lr": config.lr * group.lr,
            "weight_decay": group.weight_decay / config.lr if config.fully_decoupled else group.weight_decay,
            "lr_factor": group.lr,
            "clip_group": group.clip_group,
            "clip": group.clip,
            "optimizer": group.optimizer,
        }
        for group in parameter_groups(model, config, seqlen)
    ]
    given = read_options(config.options, optimizer_class(config.name).Options, "optimizer.options")
    parts: dict[str, Optimizer] = {}
    for name in dict.fromkeys(str(group["optimizer"]) for group in groups):
        kind, own = optimizer_class(name), [group for group in groups if group["optimizer"] == name]
        parts[name] = kind.from_config(own, config, given if name == config.name else kind.Options())
    optimizer = next(iter(parts.values())) if len(parts) == 1 else SeveralOptimizers(parts, groups)
    keep_average(optimizer, ema or EmaConfig())
    return optimizer


def rule_record(groups: Iterable[ParameterGroup]) -> dict[str, list[float]]:
    """What a checkpoint keeps of rules: name -> [factor on the rate, own clipping norm or 0] where one has either."""
    return {
        name: [group.lr, 0.0 if group.clip_group == OTHERS else group.clip]
        for group in groups
        if group.has_rule
        for name in group.names
    }


def changed_rules(before: Mapping[str, list[float]], groups: Iterable[ParameterGroup]) -> str:
    """Says in one line how rates and clipping differ from those of a checkpoint; "" where they do not.

    before: its `rule_record`.
    """
    groups = list(groups)
    now, parts = rule_record(groups), []
    for group in groups:
        names = [name for name in group.names if now.get(name) != before.get(name)]
        if names:
            said = f" (rules of {', '.join(group.sources)})" if group.has_rule else ""
            parts.append(f"{', '.join(short_names(names))}: {rule_words(group)}{said}")
    return f"other rules than when the checkpoint was made: {'; '.join(parts)}" if parts else ""


def rule_words(group: ParameterGroup) -> str:
    """Rate and clipping of a group."""
    if group.clip_group == OTHERS:
        clip = f"clipped at {group.clip:g} with the others" if group.clip else "not clipped"
    else:
        clip = f"clipped apart ({group.clip_group}) at {group.clip:g}"
    return f"learning rate x {group.lr:.4g}, {clip}"


def short_names(names: Iterable[str]) -> list[str]:
    """Names with * for the number of a layer, and how many there are of each."""
    counts: dict[str, int] = {}
    for name in names:
        short = re.sub(r"\.\d+(?=\.)", ".*", name)
        counts[short] = counts.get(short, 0) + 1
    return [f"{name} of {count} layers" if count > 1 else name for name, count in counts.items()]
