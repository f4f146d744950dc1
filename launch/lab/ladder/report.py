"""What a ladder's plan and report say: LADDER/report/{table.md, table.csv, laws.csv, plot.png}."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from matmix.launch.lab.compare.config import Entry, entries_of
from matmix.launch.lab.compare.report import LOSS, begun, counted, seeds_words
from matmix.launch.lab.compare.tuning import plan_words, tuning_table
from matmix.launch.lab.ladder.law import DRAWS, HUBER, SHARE, Fit
from matmix.launch.lab.ladder.picture import picture
from matmix.launch.lab.ladder.rates import asked_for, tuned_part, with_rates
from matmix.launch.lab.ladder.results import Family, Gap, Rung, families_of, gaps_of
from matmix.launch.lab.ladder.sizes import Ladder
from matmix.launch.many.scores import csv_of, markdown, spread, write_tables
from matmix.model.build import headdims
from matmix.train.tasks import unit_of
from matmix.train.words import duration, short_number

_HEADINGS = "size", "entry", "layers", "d_model", "headdim", "N", "off by", "parameters", "tokens", "steps"
BEYOND = 10
"""The table says what a law predicts at so many times the largest size."""


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan_text(
    ladder: Ladder, only: Sequence[str] = (), seconds: Mapping[str, float] | None = None, parallel: int = 1
) -> str:
    """Returns lines that tell what would be trained at each size. only: names of entries and of sizes; what these take
    their rates from is told too. seconds: by the title of an entry, of a training step here, as was measured."""
    comparison, seeds = ladder.comparison, ladder.comparison.settings.seeds
    trained, tuning = entries_of(comparison, only), tuned_part(ladder, only)
    rows, headings = [], [*_HEADINGS, "FLOPs", *(["time"] if seconds else [])]
    tries = comparison.settings.grid_size
    runs, flops, time = 0, 0.0, 0.0
    for entry in asked_for(ladder, only):
        own = cost(entry)
        its_runs = (len(seeds) if entry in trained else 0) + (tries if entry in tuning.entries else 0)
        runs, flops = runs + its_runs, flops + its_runs * own
        rows.append([*_size_cells(ladder, entry), short_number(own)])
        if seconds:
            took = seconds[entry.title] * entry.config.steps
            time += its_runs * took
            rows[-1].append(duration(took))
    names, sizes = (len({getattr(entry, kind) for entry in trained}) for kind in ("name", "variant"))
    least = "at least " if tries else ""
    lines = [
        " x ".join([counted(names, "entry", "entries"), counted(sizes, "size", "sizes"), seeds_words(seeds)]),
        *plan_words(tuning),
        *words_on_settings(ladder),
        f"in all {least}{runs:,} runs: {short_number(flops)} FLOPs",
    ]
    if seconds:
        total = f"{least}about {duration(time / parallel)} here, {parallel} at a time"
        lines.append(f"{total}, by a training step of each that was measured now")
    return "\n\n".join([markdown(headings, rows), "\n".join([*lines, f"runs in {comparison.home}"])])


def cost(entry: Entry) -> float:
    """Returns the FLOPs of a run, a training step at three times those of the forward pass."""
    config, task = entry.config, entry.config.task()
    return 3.0 * _tokens(entry) * task.flops(config.model, config.data.seqlen)


def _tokens(entry: Entry) -> int:
    config = entry.config
    return config.steps * config.global_batch_size * config.task().units(config.data.seqlen)


def _size_cells(ladder: Ladder, entry: Entry) -> list[str]:
    model, parameters = entry.config.model, ladder.parameters[entry.title]
    heads = ", ".join(map(str, headdims(model).values()))
    cells = [entry.variant, entry.label, str(model.n_layers), str(model.d_model), heads, f"{parameters:,}"]
    cells += [f"{parameters / entry.target - 1:+.2%}", f"{entry.parameters:,}"]
    return [*cells, short_number(_tokens(entry)), f"{entry.config.steps:,}"]


def words_on_settings(ladder: Ladder) -> list[str]:
    """Says what N is, how models and training grow with it, and where the rates come from."""
    settings, first = ladder.settings, ladder.comparison.entries[0].config
    names, tuned = list(settings.counts), list(settings.counts)[: settings.tune_sizes]
    batch = f"{first.global_batch_size:,} sequences of {first.data.seqlen:,} tokens"
    lines = [
        "N: parameters without embeddings, positions and readout; depth and width grow alike, the width to equal N.",
        f"{settings.tokens_per_parameter:g} tokens for each parameter of the size, in batches of {batch} at all sizes.",
    ]
    tune = ladder.comparison.settings.tune
    subject = ", ".join(tune) if tune and "optimizer.lr" not in tune else "Learning rate"
    how = "tuned for each entry by itself" if tune else "the recipe's, tuned for none"
    if len(tuned) < len(names):
        how += f", at {tuned[-1]}; larger sizes take it over by muP, from the entry's width there"
        how = how if len(tuned) == 1 or not tune else f"{how}; smaller ones have their own"
    elif tune:
        how += " at each size"
    return [*lines, f"{subject}: {how}."]


# -- the report -------------------------------------------------------------------------------------------------------


def write_report(ladder: Ladder) -> str:
    """Writes tables and picture of what there is; returns the text to be shown."""
    ladder, idle = _begun(with_rates(ladder))
    parts, families = families_of(ladder)
    gaps = gaps_of(families, ladder.settings.counts)
    files = {
        "table.csv": csv_of([_csv_row(ladder, rung, gaps) for family in families for rung in family.rungs.values()]),
        "laws.csv": csv_of([_law_row(family) for family in families]),
        "plot.png": picture(ladder, parts, families, gaps),
    }
    is_empty = not any(family.points for family in families)
    text = _text(ladder, families, gaps)
    return write_tables(ladder.comparison.home / "report", text, files, is_empty=is_empty, idle=idle)


def _begun(ladder: Ladder) -> tuple[Ladder, list[str]]:
    """Returns the ladder without the entries of which nothing has begun at any size, and their names."""
    idle = [name for name in begun(ladder.comparison)[1] if name not in ladder.settings.counts]
    kept = tuple(entry for entry in ladder.comparison.entries if entry.name not in idle)
    return dataclasses.replace(ladder, comparison=dataclasses.replace(ladder.comparison, entries=kept)), idle


def _text(ladder: Ladder, families: Sequence[Family], gaps: Sequence[Gap]) -> str:
    sizes, comparison = list(ladder.settings.counts), ladder.comparison
    unit, count = unit_of(comparison.entries[0].config.objective.name)[:-1], len(comparison.settings.seeds)
    about = f"Mean ± sample standard deviation over {count} seeds" if count > 1 else "One seed"
    losses = [[one.entry.label, *(one.rungs[size].result.words(LOSS) for size in sizes)] for one in families]
    sections = [
        f"{markdown(['validation loss', *sizes], losses)}\n\n{about}; nats per {unit}.",
        _law_text(families, ladder),
        _gap_text(gaps, sizes),
    ]
    rows = [[*_size_cells(ladder, rung.entry), _rate(rung.entry)] for one in families for rung in one.rungs.values()]
    sections += [markdown([*_HEADINGS, "optimizer.lr"], rows), "\n".join(words_on_settings(ladder))]
    if tuned := tuning_table(tuned_part(ladder)):
        sections.append(tuned)
    results = [rung.result for one in families for rung in one.rungs.values()]
    if without := [f"{one.entry.title} {words}" for one in results for words in one.without_a_number]:
        sections.append(f"Without a number: {'; '.join(without)}.")
    return "\n\n".join(filter(None, sections))


def _rate(entry: Entry) -> str:
    optimizer = entry.config.optimizer
    if not entry.is_ready:
        return "not tuned yet"
    width = optimizer.mup_base_width
    return f"{optimizer.lr:g}" + (f", meant for width {width}" if width not in (0, entry.config.model.d_model) else "")


def _law_text(families: Sequence[Family], ladder: Ladder) -> str:
    """Tabulates the laws, and says which entries have none and why."""
    far = BEYOND * max(ladder.settings.counts.values())
    headings = ["L = E + A N^-a", "E", "A", "a", "residuals", "points", f"L at {short_number(far)}"]
    rows, lines = [], []
    for family in families:
        if (fit := family.fit) is None:
            lines.append(f"No law for {family.name}: {family.why_no_law}.")
            continue
        values = [_value(fit, name) for name in ("E", "A", "a")]
        low, high = fit.band(far)
        ahead = f"{fit.loss(far):.3f} ({low:.3f} to {high:.3f})"
        rows.append([family.entry.label, *values, f"{100 * fit.error:.2f} %", str(len(family.points)), ahead])
    if rows:
        about = [
            f"In brackets {100 * SHARE:.0f} % of {DRAWS} fits to losses drawn around the law with the residuals seen, "
            "whose size is itself uncertain with so few points. E, A and a depend on each other: a curve is better "
            "known than its numbers, and beyond the largest size it is a guess.",
            f"Fitted to the logarithm of the losses with Huber's function ({HUBER:g}), after arXiv 2203.15556.",
        ]
        lines = [markdown(headings, rows), "", *about, *lines]
    return "\n".join(lines)


def _value(fit: Fit, name: str) -> str:
    low, high = fit.interval(name)
    return f"{getattr(fit, name):.3g} ({low:.3g} to {high:.3g})"


def _gap_text(gaps: Sequence[Gap], sizes: Sequence[str]) -> str:
    """Tabulates the gaps to the controls."""
    rows = []
    for gap in gaps:
        cells = [LOSS._replace(digits=3).words(gap.differences[size]) for size in sizes]
        slope = "" if gap.slope is None else f"{gap.slope[0]:+.3f} ± {gap.slope[1]:.3f}"
        rows.append([f"{gap.control.name} - {gap.entry.name}", *cells, slope])
    if not rows:
        return ""
    about = (
        "Loss of the control, moved along its own slope to the N of the entry, minus that of the entry, with the same"
        " seeds, in nats: positive where the entry is better. The last column: by how much it grows with ten times the"
        " parameters, ± standard error of a straight line."
    )
    return f"{markdown(['gap', *sizes, 'per tenfold N'], rows)}\n\n{about}"


def _csv_row(ladder: Ladder, rung: Rung, gaps: Sequence[Gap]) -> dict[str, Any]:
    entry, config = rung.entry, rung.entry.config
    row = {"entry": entry.name, "size": entry.variant, "control": entry.control, "N": rung.parameters}
    row |= {"parameters": entry.parameters, "layers": config.model.n_layers, "d_model": config.model.d_model}
    row |= {"tokens": _tokens(entry), "steps": config.steps, "flops": cost(entry)}
    row |= {"lr": config.optimizer.lr if entry.is_ready else None, "mup_base_width": config.optimizer.mup_base_width}
    over = spread(list(rung.losses.values()))
    row |= {"loss_mean": over and over.mean, "loss_deviation": over and over.deviation, "n": len(rung.losses)}
    row |= {f"loss_seed_{seed}": rung.losses.get(seed) for seed in ladder.comparison.settings.seeds}
    for control in dict.fromkeys(gap.control.name for gap in gaps):
        its = next((gap for gap in gaps if (gap.entry.name, gap.control.name) == (entry.name, control)), None)
        over = spread(its.differences[entry.variant]) if its else None
        row |= {f"under_{control}_mean": over and over.mean, f"under_{control}_deviation": over and over.deviation}
    return row


def _law_row(family: Family) -> dict[str, Any]:
    fit = family.fit
    row: dict[str, Any] = {"entry": family.name, "control": family.entry.control, "points": len(family.points)}
    for name in ("E", "A", "a"):
        low, high = fit.interval(name) if fit else (None, None)
        row |= {name: getattr(fit, name) if fit else None, f"{name}_low": low, f"{name}_high": high}
    return row | {"residuals": fit and fit.error, "why_none": family.why_no_law}
