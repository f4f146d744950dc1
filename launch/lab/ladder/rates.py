"""Learning rates of a ladder: the smallest sizes are tuned as those of a comparison, each entry at each size by itself;
larger ones take over what was chosen at the last of these, by muP, with the entry's width there as the base width."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matmix.launch.lab.compare import tuning
from matmix.launch.lab.compare.config import Comparison, Entry, entries_of
from matmix.launch.lab.ladder.sizes import Ladder
from matmix.launch.many.planned import PlannedRun
from matmix.launch.many.runs import Ended
from matmix.model.build import build_model
from matmix.train.optim.groups import parameter_groups


def tuned_part(ladder: Ladder, only: Sequence[str] = ()) -> Comparison:
    """Returns the sizes that are tuned, as a comparison. only: names of entries and of sizes; every entry among them is
    tuned at all sizes that are."""
    sizes = list(ladder.settings.counts)[: ladder.settings.tune_sizes]
    named = entries_of(ladder.comparison, _entries(ladder, only))
    entries = tuple(entry for entry in named if entry.variant in sizes)
    return dataclasses.replace(ladder.comparison, entries=entries)


def asked_for(ladder: Ladder, only: Sequence[str]) -> list[Entry]:
    """Returns the entries that are trained where `only` names entries and sizes, and those that only tune these."""
    tuning = tuned_part(ladder, only).entries if ladder.comparison.settings.tune else ()
    trained = entries_of(ladder.comparison, only)
    return [entry for entry in ladder.comparison.entries if entry in trained or entry in tuning]


def with_rates(ladder: Ladder) -> Ladder:
    """Returns the ladder with what its tuning runs say. Entries whose rates depend on runs that are not finished are
    not ready."""
    part = tuning.tuned(tuned_part(ladder))
    last = {entry.name: entry for entry in part.entries}
    further = ladder.comparison.entries[len(part.entries) :]
    entries = (*part.entries, *(_carried(entry, last[entry.name]) for entry in further))
    return dataclasses.replace(ladder, comparison=dataclasses.replace(ladder.comparison, entries=entries))


def tuning_tasks(ladder: Ladder, only: Sequence[str] = (), *, every: bool = False) -> list[PlannedRun]:
    """Lists the tuning runs that are known to be needed and not finished, of a ladder as `with_rates` returns it;
    every: lists those that are finished too."""
    return tuning.tuning_tasks(tuned_part(ladder, only), every=every)


def tune(ladder: Ladder, only: Sequence[str], parallel: int) -> tuple[Ladder, Ended]:
    """Trains what tunes the entries, as in a comparison; returns the ladder with what was chosen."""
    _, ended = tuning.tune(tuned_part(ladder, only), (), parallel)
    return with_rates(ladder), ended


def _entries(ladder: Ladder, only: Sequence[str]) -> list[str]:
    """Returns the names without those of sizes: every entry is tuned at the sizes that are tuned."""
    return [name for name in only if name not in ladder.settings.counts]


def _carried(entry: Entry, tuned: Entry) -> Entry:
    """tuned: the entry at the last size that is tuned."""
    if tuned.chosen:
        entry = dataclasses.replace(entry, config=tuning.with_values(entry, tuned.chosen), chosen=tuned.chosen)
    elif tuned.tried:
        entry = dataclasses.replace(entry, tried=tuned.tried)
    if entry.config.optimizer.mup_base_width:  # the recipe's own
        return entry
    optimizer = dataclasses.replace(entry.config.optimizer, mup_base_width=tuned.config.model.d_model)
    return dataclasses.replace(entry, config=dataclasses.replace(entry.config, optimizer=optimizer))


def check_rates(ladder: Ladder) -> None:
    """Raises ValueError (one line) for an optimizer or a model whose rates cannot follow the width by muP."""
    for entry in ladder.comparison.entries:
        config, count = entry.config, len(ladder.settings.counts)
        if not config.optimizer.mup_base_width:
            continue
        try:
            parameter_groups(build_model(config.model, device="meta"), config.optimizer, config.data.seqlen)
        except ValueError as error:
            advice = f"tune each of the {count} sizes by itself instead, by --tune-sizes"
            raise ValueError(f'entry "{entry.title}": its rate cannot follow the width: {error}; or {advice}') from None
