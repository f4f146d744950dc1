"""Makes the groups of parameters that are updated alike. Their rules come, in this order, from the shapes (matrices and
embeddings are decayed, vectors are not), from mixers for their own parameters, and from the recipe."""

import collections
import dataclasses
import difflib
import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from matmix.model.parameter_rules import ParameterRule, stated_rules
from matmix.train.arguments import read_options
from matmix.train.optim import FALLBACK, Optimizer, optimizer_class
from matmix.train.optim.averaging import keep_average
from matmix.train.optim.base import OTHERS, SeveralOptimizers, full_shape
from matmix.train.optim.config import RULE, EmaConfig, OptimizerConfig
from matmix.train.optim.width import width_factors


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
    """The norm that they are clipped to; 0 = not at all."""
    optimizer: str
    """The name of the optimizer that updates them."""
    sources: tuple[str, ...]
    """The mixers, by name, and the rules of the recipe, by patterns, that say something of one of them."""
    blocks: tuple[tuple[int, ...] | None, ...]
    """The linear maps in each of them, as `ParameterRule.blocks` has it."""

    @property
    def has_rule(self) -> bool:
        """True where rate or clipping are other than the run's."""
        return self.lr != 1 or self.clip_group != OTHERS


@dataclasses.dataclass(slots=True)
class _Treatment:
    """How one parameter is updated, as its sources say in turn."""

    weight_decay: float | None  # None = the run's
    lr: float = 1.0
    width: float = 1.0  # further factor on the rate, and one over it on weight decay
    clip: float | None = None  # None = with the others
    optimizer: str | None = None  # None = the run's
    blocks: tuple[int, ...] | None = None
    clipped_with: tuple[str, Any] = (OTHERS, None)  # what to call those it is clipped with, and what they share
    said_by: dict[str, str] = dataclasses.field(default_factory=dict)  # field -> the source that it is from
    sources: tuple[str, ...] = ()

    def take(self, source: str, shared: tuple[str, Any], fields: Mapping[str, Any]) -> None:
        """Takes over the fields that are not None. shared: as `clipped_with`, where they say "clip"."""
        given = {field: value for field, value in fields.items() if value is not None}
        for field, value in given.items():
            setattr(self, field, value)
            self.said_by[field] = source
        self.clipped_with = shared if "clip" in given else self.clipped_with
        self.sources += (source,) * bool(given)


def parameter_groups(model: nn.Module, config: OptimizerConfig, seqlen: int) -> list[ParameterGroup]:
    """Returns the groups of the trainable parameters of `model`, on the meta device, sharded or not; seqlen: of the
    training sequences. Raises ValueError (one line) for a rule that matches nothing or cannot apply."""
    shapes = {name: full_shape(p) for name, p in model.named_parameters() if p.requires_grad}
    treatments = {name: _Treatment(None if len(shape) >= 2 else 0.0) for name, shape in shapes.items()}
    for name, (owner, rule) in stated_rules(model, seqlen).items():
        if name in treatments:
            own = treatments[name]
            if rule.blocks and sum(rule.blocks) != shapes[name][0]:
                rows = f"{sum(rule.blocks)} rows in all for {name}, which has {shapes[name][0]}"
                raise ValueError(f"parameter_rules of {owner}: blocks = {rule.blocks} are {rows}")
            own.blocks = rule.blocks
            if rule != ParameterRule(blocks=rule.blocks):
                fields = ("lr", "clip", "weight_decay", "optimizer") if config.mixer_rules else ("weight_decay",)
                own.take(owner, (owner, rule), {field: getattr(rule, field) for field in fields})
    if config.embedding_lr != 1:
        for owner, module in model.named_modules():
            if isinstance(module, nn.Embedding) and (name := f"{owner}.weight") in treatments:
                treatments[name].take("optimizer.embedding_lr", ("", None), {"lr": config.embedding_lr})
    if config.layer_decay != 1:
        for name, height in _heights(shapes).items():
            if height:
                lr = treatments[name].lr * config.layer_decay**height
                treatments[name].take("optimizer.layer_decay", ("", None), {"lr": lr})
    for number, rule in enumerate(config.rule):
        said = {field: getattr(rule, field) for field in ("lr", "clip", "weight_decay", "optimizer")}
        for name in _matched(rule.patterns, shapes, RULE):
            treatments[name].take(rule.title, (rule.label, number), said)
    for name in _matched(config.freeze, shapes, "optimizer.freeze:"):
        # Without a rate nothing moves; clipped apart, their gradients do not scale those of the others.
        said = {"lr": 0.0, "clip": math.inf, "weight_decay": 0.0}
        treatments[name].take("optimizer.freeze", ("frozen", None), said)
    for name, factors in width_factors(model.config, config.mup_base_width).items() if config.mup_base_width else ():
        if name in treatments and factors.lr != 1:
            treatments[name].take("optimizer.mup_base_width", ("", None), {"width": factors.lr})
    for name, own in treatments.items():
        if own.weight_decay and len(shapes[name]) < 2:
            raise ValueError(
                f"{own.said_by['weight_decay']}: weight_decay = {own.weight_decay:g} cannot apply to {name}, a vector "
                f"of shape {tuple(shapes[name])}: only matrices are decayed; let its pattern match those alone"
            )
        kind = optimizer_class(own.optimizer or config.name)
        if not kind.takes(name, shapes[name]) or (kind.of_linear_maps and own.blocks == ()):
            if own.optimizer is not None:
                problem = f"the optimizer {own.optimizer} cannot update {name}, of shape {tuple(shapes[name])}"
                raise ValueError(f"{own.said_by['optimizer']}: {problem}; let its pattern match others")
            own.optimizer = FALLBACK
        elif config.mup_base_width and not kind.steps_like_adamw:
            problem = (
                f"its factors are for adamw, adamw_8bit, stable_adamw and lion, not for {own.optimizer or config.name}"
            )
            raise ValueError(f"optimizer.mup_base_width = {config.mup_base_width}: {problem}; set it to 0")
    return _grouped(treatments, config)


def _heights(names: Iterable[str]) -> dict[str, int]:
    """Returns how far below the output each parameter lies: the last layer 1, embeddings one more than the first."""
    layers = {name: int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.", name))}
    depth = 1 + max(layers.values(), default=-1)
    return {
        name: depth - layers[name] if name in layers else (depth + 1) * name.startswith("embedding") for name in names
    }


def _matched(patterns: Iterable[str], names: Collection[str], where: str) -> list[str]:
    """Returns the names that any of the patterns is for, in their order. Raises ValueError (one line, beginning with
    `where`) for a pattern that is for none."""
    matched: set[str] = set()
    for pattern in patterns:
        if not (own := fnmatch.filter(names, pattern)):
            near = ", ".join(_nearest(pattern, names))
            raise ValueError(f'{where} "{pattern}" matches no parameter of this model; the nearest: {near}')
        matched.update(own)
    return [name for name in names if name in matched]


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Returns up to three names of which a part looks like the pattern, the first one for each such part."""
    literal = pattern.strip("*.")
    width = literal.count(".") + 1
    parts: dict[str, str] = {}
    for name in names:
        words = name.split(".")
        for start in range(max(len(words) - width, 0) + 1):
            parts.setdefault(".".join(words[start : start + width]), name)
    return list(dict.fromkeys(parts[part] for part in difflib.get_close_matches(literal, parts, n=3, cutoff=0.0)))


def _grouped(treatments: Mapping[str, _Treatment], config: OptimizerConfig) -> list[ParameterGroup]:
    """Returns the groups: what is treated by default, decayed and not, then the others as their parameters come."""
    labels = _labels(own.clipped_with for own in treatments.values())
    usual = (1.0, 1.0, None, OTHERS, None, config.name), (1.0, 1.0, 0.0, OTHERS, None, config.name)
    members: dict[tuple[float, float, float | None, str, float | None, str], list[str]] = {key: [] for key in usual}
    for name, own in treatments.items():
        key = (own.lr, own.width, own.weight_decay, labels[own.clipped_with], own.clip, own.optimizer or config.name)
        members.setdefault(key, []).append(name)
    return [
        ParameterGroup(
            names=tuple(names),
            lr=lr * width,
            weight_decay=(config.weight_decay if weight_decay is None else weight_decay) / width,
            clip_group=label,
            clip=config.max_grad_norm if clip is None else clip,
            optimizer=optimizer,
            sources=tuple(dict.fromkeys(source for name in names for source in treatments[name].sources)),
            blocks=tuple(treatments[name].blocks for name in names),
        )
        for (lr, width, weight_decay, label, clip, optimizer), names in members.items()
        if names
    ]


def _labels(shared: Iterable[tuple[str, Any]]) -> dict[tuple[str, Any], str]:
    """Returns a name of its own for each set of parameters that are clipped together."""
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
    """Makes the optimizer that `config` names, or several as one where rules or shapes ask for others, of the trainable
    parameters of `model`, sharded or not, with the average of them that `ema` asks for. Its groups say beside torch's
    options "lr_factor", "clip_group", "clip", "optimizer" and "blocks". Raises ValueError as `parameter_groups` does,
    and for unknown names or options."""
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
            "blocks": group.blocks,
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
    """Returns what a checkpoint keeps of rules: name -> [factor on the rate, own clipping norm or 0]."""
    return {
        name: [group.lr, 0.0 if group.clip_group == OTHERS else group.clip]
        for group in groups
        if group.has_rule
        for name in group.names
    }


def changed_rules(before: Mapping[str, list[float]], groups: Iterable[ParameterGroup]) -> str:
    """Says in one line how rates and clipping differ from `before`, a checkpoint's `rule_record`; "" if they do not."""
    groups = list(groups)
    now, parts = rule_record(groups), []
    for group in groups:
        names = [name for name in group.names if now.get(name) != before.get(name)]
        if names:
            said = f" (rules of {', '.join(group.sources)})" if group.has_rule else ""
            parts.append(f"{', '.join(short_names(names))}: {rule_words(group)}{said}")
    return f"other rules than when the checkpoint was made: {'; '.join(parts)}" if parts else ""


def rule_words(group: ParameterGroup) -> str:
    """Says in words what rate and clipping a group has."""
    if group.clip_group == OTHERS:
        clip = f"clipped at {group.clip:g} with the others" if group.clip else "not clipped"
    else:
        clip = f"clipped apart ({group.clip_group}) at {group.clip:g}"
    return f"learning rate x {group.lr:.4g}, {clip}"


def short_names(names: Iterable[str]) -> list[str]:
    """Returns names with * for the number of a layer, and how many there are of each."""
    counts = collections.Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return [f"{name} of {count} layers" if count > 1 else name for name, count in counts.items()]
