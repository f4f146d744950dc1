"""Rules of a recipe (`[[optimizer.rule]]`) in a comparison: every entry is held against them before any is trained."""

from __future__ import annotations

import dataclasses

from matmix.launch.lab.compare.config import Entry
from matmix.model.build import build_model
from matmix.train.optim.config import RuleConfig
from matmix.train.optim.optimizer import matches_any, parameter_groups


def with_checked_rules(entry: Entry) -> Entry:
    """The entry; a control without the patterns of the recipe's rules that are for mixers which it does not have.

    Raises ValueError (one line) for rules that do not fit the entry's model.
    """
    config = entry.config
    if not config.optimizer.rule:
        return entry
    model = build_model(config.model, device="meta")
    if entry.control:
        names = [name for name, _ in model.named_parameters()]
        rules = (_fitting(rule, names) for rule in config.optimizer.rule)
        optimizer = dataclasses.replace(config.optimizer, rule=tuple(rule for rule in rules if rule is not None))
        config = dataclasses.replace(config, optimizer=optimizer)
    try:
        parameter_groups(model, config.optimizer, config.data.seqlen)
    except ValueError as error:
        raise ValueError(f'entry "{entry.title}": {error}') from None
    return dataclasses.replace(entry, config=config)


def _fitting(rule: RuleConfig, names: list[str]) -> RuleConfig | None:
    """The rule with those of its patterns that match a name; None where none does."""
    patterns = tuple(pattern for pattern in rule.patterns if matches_any(pattern, names))
    if patterns == rule.patterns:
        return rule
    return dataclasses.replace(rule, match=patterns) if patterns else None
