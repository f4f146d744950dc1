"""How the entries of a comparison differ in more than their mixers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matmix.launch.lab.compare.config import Entry
from matmix.launch.lab.compare.width import headdims
from matmix.train.recipe import config_to_dict, differences


def differing_keys(entries: Sequence[Entry]) -> list[str]:
    """Keys outside of `[model]` in which entries differ: with any of them they are not trained alike."""
    return sorted(key for key in _values(entries) if not key.startswith("model."))


def words_on_differences(entries: Sequence[Entry]) -> list[str]:
    """How the entries of a table differ in more than their mixers, and at which learning rates they are compared: one
    line for each subject."""
    lines = [_words_on_rates(entries)]
    if keys := [key for key in differing_keys(entries) if key != "optimizer.lr"]:
        lines.append(f"Not alike in all entries: {', '.join(keys)}.")
    if changed := [f"{entry.name} {pairs}" for entry in entries if (pairs := changed_headdims(entry))]:
        lines.append(f"Headdim other than the recipe's, for equal parameters: {', '.join(changed)}.")
    for key, values in sorted(_values(entries).items()):
        if key.startswith("model.") and not key.startswith(("model.layers", "model.mixers.", "model.d_model")):
            lines.append(f"{key}: {_by_value([entry.name for entry in entries], values)}.")
    return lines


def _words_on_rates(entries: Sequence[Entry]) -> str:
    rates = [f"{entry.config.optimizer.lr:g}" for entry in entries]
    if len(set(rates)) == 1:
        return (
            f"Learning rate {rates[0]}, the same for all entries and tuned for none: at another one their order may be "
            "another."
        )
    return f"Learning rate: {_by_value([entry.name for entry in entries], rates)}."


def changed_headdims(entry: Entry) -> str:
    """As in "16 -> 20"; "" where the recipe's is kept."""
    pairs = [(entry.own_headdims.get(name, headdim), headdim) for name, headdim in headdims(entry.config.model).items()]
    return ", ".join(f"{own} -> {headdim}" for own, headdim in pairs if own != headdim)


def _values(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """Key -> its value in each entry, of the keys in which entries differ."""
    first = entries[0].config
    changes = [
        {key: (old, new) for key, old, new in differences(config_to_dict(first), entry.config)} for entry in entries
    ]
    firsts = {key: old for change in changes for key, (old, _) in change.items()}
    return {key: [change.get(key, (None, old))[1] for change in changes] for key, old in firsts.items()}


def _by_value(names: Sequence[str], values: Sequence[Any]) -> str:
    """The entries that have each value; the most frequent value stands last, without their names."""
    owners: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        owners.setdefault(str(value).lower() if isinstance(value, bool) else str(value), []).append(name)
    *few, (usual, _) = sorted(owners.items(), key=lambda item: len(item[1]))
    return "; ".join([*(f"{value} in {', '.join(who)}" for value, who in few), f"{usual} in the others"])
