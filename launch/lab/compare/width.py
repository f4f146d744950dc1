"""Brings the entries of a comparison to equally many parameters by `d_model`, and `headdim` where it does not divide
that; and says how they differ in more than mixers."""

import bisect
import contextlib
import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matmix.data.loading.loader import Loader
from matmix.launch.lab.compare.config import Comparison, Entry, entries_of
from matmix.model.build import at_width, build_model, count_parameters, headdims, parameters_of
from matmix.model.config import ModelConfig
from matmix.train.config import RunConfig
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.optim.groups import parameter_groups
from matmix.train.recipe import config_to_dict, differences


def matched(comparison: Comparison, sizes: Mapping[str, int] | None = None, only: Sequence[str] = ()) -> Comparison:
    """Returns the comparison with the widths at which all entries of a variant have equally many parameters: those that
    the recipe names, else those of the first entry there. sizes: by variant, the parameters without embeddings that are
    matched instead. only: names of entries and of variants; others are left out where this fails. Raises ValueError
    (one line) for an entry that has no such width and for unknown names, FileNotFoundError and ValueError where the
    vocabulary is left to data that cannot be opened."""
    settings, asked = comparison.settings, {entry.title for entry in entries_of(comparison, only)}
    targets: dict[str, int] = {}
    entries = []
    for entry in with_facts(comparison.entries):
        own = entry.config.model
        if sizes is not None:
            target = sizes[entry.variant]
        else:
            target = targets.setdefault(entry.variant, settings.parameters or count_parameters(own))
        try:
            model = match_width(own, target, settings.tolerance, embeddings=sizes is None)
            config = _with_checked_rules(dataclasses.replace(entry.config, model=model), bool(entry.control))
        except ValueError as error:
            if entry.title not in asked:
                continue
            advice = "; or compare without controls (--comparison.controls False)" if entry.control else ""
            raise ValueError(f'entry "{entry.title}": {error}{advice}') from None
        facts = {"parameters": count_parameters(model), "target": target, "own_headdims": headdims(own)}
        entries.append(dataclasses.replace(entry, config=config, **facts))
    return dataclasses.replace(comparison, entries=tuple(entries))


def with_facts(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yields the entries with the vocabulary sizes that they leave to the data, each of which is opened once."""
    loaders: dict[str, Loader] = {}
    with contextlib.ExitStack() as opened:
        for entry in entries:
            config = entry.config
            # Of images nothing is taken from the data but the steps of `epochs`, and the number of classes.
            kind = config.model.model_class
            counts = config.epochs or (kind.takes_head and not config.model.head.outputs)
            needed = config.model.vocab_size == 0 and (kind.inputs != "images" or counts)
            if needed or config.epochs:
                key, missing = repr(config.data), () if needed else (FileNotFoundError,)
                with contextlib.suppress(*missing):  # a report does without
                    if key not in loaders:
                        loaders[key] = opened.enter_context(contextlib.closing(make_loader(config, "train", 0, 1)))
                    config = with_data_facts(config, loaders[key])
            yield dataclasses.replace(entry, config=config)


def match_width(model: ModelConfig, target: int, tolerance: float, *, embeddings: bool = True) -> ModelConfig:
    """Returns `model` with the d_model that brings it within `tolerance` of `target` parameters, embeddings counted or
    not. Of several: one with the headdim that it has, if there is one; then widths and headdims that are multiples of 8
    before those of 4, 2 and 1 (GPUs multiply matrices of other sizes at a fraction of their speed); then the smallest
    deviation. Raises ValueError naming the nearest widths where none is within the tolerance."""
    widths = _Widths(model, embeddings=embeddings)

    def deviation(width: int) -> float:
        return widths.count(width) / target - 1

    if deviation(model.d_model) == 0:
        return model
    high = model.d_model
    while widths.count(widths.first_from(high)) < target:
        high *= 2
    # `low` is the last width that fits with fewer parameters, 0 = none, and `high` the first one with as many.
    low = bisect.bisect_left(range(high), target, 1, key=lambda width: widths.count(widths.first_from(width))) - 1
    high = widths.first_from(low + 1)
    reach = 2 + math.ceil(3 * tolerance * high)  # parameters grow about as fast as the width, or faster
    near = [width for width in range(max(1, low - reach), high + reach + 1) if widths.at(width) is not None]
    kinds: dict[tuple[bool, int], list[int]] = {}
    for width in near:
        sizes = headdims(widths.at(width))
        kind = sizes != headdims(model), max(8 // math.gcd(8, size) for size in (width, *sizes.values()))
        kinds.setdefault(kind, []).append(width)
    # A kind at a time, since only counting takes time.
    within = ([width for width in kinds[kind] if abs(deviation(width)) <= tolerance] for kind in sorted(kinds))
    best = min(next(filter(None, within), []), key=lambda width: abs(deviation(width)), default=None)
    if best is None:
        nearest = sorted(sorted(near, key=lambda width: abs(deviation(width)))[:2])
        sizes = [f"{widths.count(width):,} ({deviation(width):+.2%}) at d_model = {width}" for width in nearest]
        lack = f"no width has {target:,} parameters within {tolerance:.2%}; the nearest: {', '.join(sizes) or 'none'}"
        advice = "raise comparison.tolerance, or give the entry another headdim or number of layers"
        raise ValueError(f"{lack}; {advice}")
    config = widths.at(best)
    counted = parameters_of(build_model(config, device="meta"), embeddings=embeddings)
    assert counted == widths.count(best), "layers of one kind have equally many parameters"
    return config


class _Widths:
    """Variants of a model by width, and their parameters, embeddings among them or not."""

    def __init__(self, model: ModelConfig, *, embeddings: bool) -> None:
        self.model, self.embeddings = model, embeddings
        self.count = functools.cache(self._count)
        self.at: Callable[[int], ModelConfig | None] = functools.cache(functools.partial(at_width, model))

    def _count(self, width: int) -> int:
        """Its parameters: one layer of each kind is counted, on the meta device."""
        config = self.at(width)
        assert config is not None
        kinds = min(len(config.layers), config.n_layers)
        model = build_model(dataclasses.replace(config, n_layers=kinds), device="meta")
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
        outside = parameters_of(model, embeddings=self.embeddings) - sum(blocks)
        # An encoder and a decoder have n_layers each.
        parts = [blocks[begin : begin + kinds] for begin in range(0, len(blocks), kinds)]
        return outside + sum(part[index % kinds] for part in parts for index in range(config.n_layers))

    def first_from(self, width: int) -> int:
        """Returns the first width from `width` on that fits."""
        multiple = -(-width // self.model.d_model) * self.model.d_model
        for candidate in range(width, 2 * multiple + 1):
            if self.at(candidate) is not None:
                return candidate
        raise ValueError(f"no d_model from {width} to {2 * multiple} fits the options of its mixers")


def _with_checked_rules(config: RunConfig, is_control: bool) -> RunConfig:
    """Returns the config; that of a control without patterns of rules for mixers that it does not have. Raises
    ValueError (one line) for rules that do not fit the model."""
    if not config.optimizer.rule:
        return config
    model = build_model(config.model, device="meta")
    if is_control:
        names = [name for name, _ in model.named_parameters()]
        rules = []
        for rule in config.optimizer.rule:
            own = tuple(pattern for pattern in rule.patterns if fnmatch.filter(names, pattern))
            if own:
                rules.append(rule if own == rule.patterns else dataclasses.replace(rule, match=own))
        config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, rule=tuple(rules)))
    parameter_groups(model, config.optimizer, config.data.seqlen)
    return config


def differing_keys(entries: Sequence[Entry]) -> list[str]:
    """Keys outside of `[model]` in which entries differ: with any of them they are not trained alike."""
    return sorted(key for key in _values(entries) if not key.startswith("model."))


def words_on_differences(entries: Sequence[Entry]) -> list[str]:
    """Says how entries differ in more than their mixers, and at which learning rates they are compared."""
    names, rates = [entry.name for entry in entries], [f"{entry.config.optimizer.lr:g}" for entry in entries]
    tuned = entries[0].tunes
    lines = [f"Learning rate: {_by_value(names, rates)}."]
    if "optimizer.lr" in tuned:
        lines = []
    elif len(set(rates)) == 1:
        same = f"Learning rate {rates[0]}, the same for all entries and tuned for none"
        lines = [f"{same}: at another one their order may be another."]
    if tuned:
        lines.append(f"Tuned for each entry by itself: {', '.join(tuned)}.")
    if keys := [key for key in differing_keys(entries) if key not in ("optimizer.lr", *tuned)]:
        lines.append(f"Not alike in all entries: {', '.join(keys)}.")
    if changed := [f"{entry.name} {pairs}" for entry in entries if (pairs := changed_headdims(entry))]:
        lines.append(f"Headdim other than the recipe's, for equal parameters: {', '.join(changed)}.")
    for key, values in sorted(_values(entries).items()):
        if key.startswith("model.") and not key.startswith(("model.layers", "model.mixers.", "model.d_model")):
            lines.append(f"{key}: {_by_value(names, values)}.")
    return lines


def changed_headdims(entry: Entry) -> str:
    """Returns words such as "16 -> 20"; "" where the recipe's is kept."""
    pairs = [(entry.own_headdims.get(name, headdim), headdim) for name, headdim in headdims(entry.config.model).items()]
    return ", ".join(f"{own} -> {headdim}" for own, headdim in pairs if own != headdim)


def _values(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """Returns for each key in which entries differ its value in each entry."""
    first = config_to_dict(entries[0].config)
    changes = [{key: (old, new) for key, old, new in differences(first, entry.config)} for entry in entries]
    firsts = {key: old for change in changes for key, (old, _) in change.items()}
    return {key: [change.get(key, (None, old))[1] for change in changes] for key, old in firsts.items()}


def _by_value(names: Sequence[str], values: Sequence[Any]) -> str:
    """Returns the entries that have each value; the most frequent value stands last, without their names."""
    owners: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        owners.setdefault(str(value).lower() if isinstance(value, bool) else str(value), []).append(name)
    *few, (usual, _) = sorted(owners.items(), key=lambda item: len(item[1]))
    return "; ".join([*(f"{value} in {', '.join(who)}" for value, who in few), f"{usual} in the others"])
