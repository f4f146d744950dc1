"""Tables and the picture of a comparison: COMPARISON/report/{table.md, table.csv, plot.png}."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from matmix.data.storage.files import write_atomic
from matmix.launch.lab.compare.config import Comparison
from matmix.launch.lab.compare.downstream import kept_downstream, score_columns
from matmix.launch.lab.compare.finetuned import ScoreColumn
from matmix.launch.lab.compare.picture import picture
from matmix.launch.lab.compare.results import (
    EntryResult,
    RunResult,
    accuracy_metrics,
    collect,
    gain_over_no_mixer,
    metrics_of,
    unnamed_folders,
)
from matmix.launch.lab.compare.settings import changed_headdims, words_on_differences
from matmix.launch.lab.compare.speed import current_rows, speed_words
from matmix.launch.lab.compare.tasks import tasks_of
from matmix.launch.lab.compare.width import headdims
from matmix.launch.many.spread import mean_in_words, metric_in_words, spread
from matmix.launch.many.table import markdown
from matmix.model.config import ModelConfig
from matmix.train.evaluators.base import averaged_metrics
from matmix.train.tasks import unit_of
from matmix.train.words import short_number

Row = TypeVar("Row")
Columns = dict[str, Callable[[EntryResult], str]]
"""Heading of a column -> what it says of an entry."""


def plan_text(comparison: Comparison) -> str:
    """What would be trained: widths, parameters, cost."""
    parts = comparison.by_variant()
    sections = [_plan_of_variant(part) for part in parts]
    seeds = comparison.settings.seeds
    counts = [_count(len(parts[0].entries), "entry", "entries")]
    if parts[0].entries[0].variant:
        counts.append(_count(len(parts), "variant", "variants"))
        sections = [f"{part.entries[0].variant}:\n{text}" for part, text in zip(parts, sections, strict=True)]
    counts.append(f"{_count(len(seeds), 'seed', 'seeds')} ({', '.join(map(str, seeds))})")
    return "\n\n".join([*sections, f"{' x '.join(counts)}\nruns in {comparison.home}"])


def write_report(comparison: Comparison) -> str:
    """Writes table and picture of what there is; returns the text to be shown.

    A report that is there stays where no run is finished: an empty one would say less.
    """
    parts = comparison.by_variant()
    results = [collect(part) for part in parts]
    folder = comparison.home / "report"
    text = report_text(comparison, parts, results)
    files = folder / "table.md", folder / "table.csv", folder / "plot.png"
    if not any(result.values("loss") for found in results for result in found) and files[0].is_file():
        return f"{text}\n\nNo run of this table is finished: {folder} is left as it was."
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in zip(files, (text + "\n", table_csv(results), picture(results)), strict=True):
        write_atomic(path, content)
    return f"{text}\n\n{', '.join(map(str, files))}"


def report_text(comparison: Comparison, parts: Sequence[Comparison], results: Sequence[Sequence[EntryResult]]) -> str:
    """All tables in Markdown: with variants first a summary, then one for each."""
    tables = [table_text(part, found, is_first=part is parts[0]) for part, found in zip(parts, results, strict=True)]
    if parts[0].entries[0].variant:
        named = [f"## {part.entries[0].variant}\n\n{table}" for part, table in zip(parts, tables, strict=True)]
        tables = [summary_text(parts, results), *named]
    if folders := unnamed_folders(comparison):
        tables[-1] += f"\nAlso in {comparison.home}, but not in the recipe: {', '.join(folders)}."
    return "\n\n".join(tables)


def table_text(comparison: Comparison, results: Sequence[EntryResult], *, is_first: bool = True) -> str:
    """The table of a variant, with what is to be known about its numbers. Speed is measured in the first one."""
    accuracies = accuracy_metrics(results)
    columns: Columns = {
        "entry": lambda result: result.entry.label,
        "parameters": lambda result: f"{result.entry.parameters:,}",
        "d_model": lambda result: str(result.entry.config.model.d_model),
        **_accuracy_columns(accuracies),
        "validation loss": lambda result: _mean(result, "loss", 4),
    }
    if not accuracies:
        columns |= _language_columns(results)
    downstream = kept_downstream(comparison.home)
    scores = score_columns(downstream)
    columns |= {**_downstream_columns(results, scores), "n": _runs}
    unit = unit_of(comparison.entries[0].config.objective.name)
    columns |= {
        f"{unit}/s": lambda result: "" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}",
        "peak memory (MiB)": lambda result: "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:,.0f}",
    }
    speeds = speed_words(comparison) if is_first or current_rows(comparison) else []
    if not speeds:
        del columns[f"{unit}/s"], columns["peak memory (MiB)"]
    several = any(len(result.values("loss")) > 1 for result in results)
    about = f"oss in nats per {unit[:-1]}."
    about = f"Mean ± sample standard deviation over n seeds; l{about}" if several else f"L{about}"
    lines = [_table(columns, results), "", about]
    if accuracies:
        chance = fmean(value for result in results for value in result.values("chance_accuracy"))
        lines.append(f"Accuracy at multiples of the training length; chance {100 * chance:.1f} %.")
    for one in downstream:
        if any(column.heading in columns for column in one.columns):
            lines += one.words(tasks_of(comparison))
    lines += [*speeds, *words_on_differences(comparison.entries)]
    runs = [(f"{result.entry.name} seed {run.seed}", run) for result in results for run in result.runs]
    if others := [f"{title} ({run.others})" for title, run in runs if run.others]:
        lines.append(f"Left out, since trained with other settings: {', '.join(others)}.")
    if open_runs := [f"{title} ({run.state})" for title, run in runs if not (run.validation or run.others)]:
        lines.append(f"Not finished: {', '.join(open_runs)}.")
    return "\n".join([*lines, *_lines_on_missing_scores(runs, scores)])


def summary_text(parts: Sequence[Comparison], results: Sequence[Sequence[EntryResult]]) -> str:
    """A row for each entry over all variants: accuracy at the training length and at the longest, or the loss and its
    distance from no mixer. The best on average first, those that lack a variant last."""
    columns: dict[str, Callable[[str], str]] = {"entry": lambda name: labels[name]}
    labels = {entry.name: entry.label for entry in parts[0].entries}
    merits: dict[str, list[float]] = {name: [] for name in labels}
    for part, found in zip(parts, results, strict=True):
        variant, by_name = part.entries[0].variant, {result.entry.name: result for result in found}
        accuracies = accuracy_metrics(found)
        own = {"loss": lambda result: _mean(result, "loss", 4), **_gain_column(found)}
        if accuracies:
            own = _accuracy_columns({length: accuracies[length] for length in sorted({1, max(accuracies)})})
        for heading, cell in own.items():
            columns[f"{variant}: {heading}"] = lambda name, cell=cell, by_name=by_name: cell(by_name[name])
        for name, result in by_name.items():
            if result.values("loss"):
                merits[name].append(result.mean("accuracy") if accuracies else -result.ranked_loss())

    def place(name: str) -> tuple[int, float]:
        return -len(merits[name]), -fmean(merits[name] or [0.0])

    return _table(columns, sorted(labels, key=place))


def table_csv(results: Sequence[Sequence[EntryResult]]) -> str:
    """The same of all variants, unrounded, with all metrics and each seed's own values."""
    metrics = list(dict.fromkeys(["loss", *metrics_of([result for found in results for result in found])]))
    rows = []
    for found in results:
        for result in found:
            entry, model = result.entry, result.entry.config.model
            row = {"entry": entry.name, "variant": entry.variant, "control": entry.control}
            row |= {"parameters": entry.parameters, "d_model": model.d_model}
            row["headdim"] = _headdims(model).replace(",", "")
            for name in metrics:
                over = spread(result.values(name))
                row[f"{name}_mean"], row[f"{name}_deviation"] = (over.mean, over.deviation) if over else (None, None)
            row |= {"gain_over_no_mixer": gain_over_no_mixer(result, found), "n": len(result.values("loss"))}
            row |= {"tokens_per_second": result.tokens_per_second, "peak_bytes": result.peak_bytes}
            row |= {f"{name}_seed_{run.seed}": run.metrics.get(name) for name in metrics for run in result.runs}
            rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table(columns: dict[str, Callable[[Row], str]], rows: Iterable[Row]) -> str:
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def _plan_of_variant(comparison: Comparison) -> str:
    rows = []
    for entry in comparison.entries:
        config = entry.config
        flops = config.task().flops(config.model, config.data.seqlen)
        heads = changed_headdims(entry) or _headdims(config.model)
        deviation = f"{entry.parameters / entry.target - 1:+.2%}"
        rows.append(
            [entry.label, str(config.model.d_model), heads, f"{entry.parameters:,}", deviation, short_number(flops)]
        )
    config = comparison.entries[0].config
    task = config.task()
    columns = ["entry", "d_model", "headdim", "parameters", "off by", f"forward FLOPs per {task.unit[:-1]}"]
    units = config.steps * config.global_batch_size * task.units(config.data.seqlen)
    batch = f"{config.global_batch_size:,} {task.unit}"
    if task.unit == "tokens":
        batch = f"{config.global_batch_size:,} sequences of {config.data.seqlen:,} tokens"
    steps = f"{_count(config.steps, 'step', 'steps')} of {batch} each, {short_number(units)} {task.unit} a run"
    return "\n".join([markdown(columns, rows), "", steps, *words_on_differences(comparison.entries)])


def _accuracy_columns(accuracies: dict[int, str]) -> Columns:
    return {
        f"accuracy {length}x (%)": lambda result, metric=metric: _mean(result, metric, 1, scale=100)
        for length, metric in accuracies.items()
    }


def _language_columns(results: Sequence[EntryResult]) -> Columns:
    """Of language models and encoders: their second measure, and what context bought."""
    columns: Columns = {}
    metrics = results[0].entry.config.task().metrics[:1]
    if any(result.entry.config.ema.decay for result in results):
        metrics = (*metrics, *averaged_metrics(metrics))
    for metric in metrics:
        columns[metric.heading] = lambda result, metric=metric: metric_in_words(result.values(metric.name), metric)
    columns |= _gain_column(results)
    if "context_gain" in metrics_of(results):
        columns["context gain (nats)"] = lambda result: _mean(result, "context_gain", 3)
    return columns


def _downstream_columns(results: Sequence[EntryResult], scores: Sequence[ScoreColumn]) -> Columns:
    """Of encoders that have been fine-tuned: their scores on each task, and means over several."""
    known = metrics_of(results)
    return {
        one.heading: functools.partial(_mean, metric=one.key, digits=one.digits, scale=one.scale)
        for one in scores
        if one.key in known
    }


def _lines_on_missing_scores(runs: Sequence[tuple[str, RunResult]], scores: Sequence[ScoreColumn]) -> list[str]:
    """Which finished runs, by their titles, lack a score."""
    tasks: dict[str, list[str]] = {}
    for one in scores:
        lacks = [title for title, run in runs if run.validation and len(run.finetuned.get(one.key, ())) < one.runs]
        if one.task and lacks:
            tasks.setdefault(", ".join(lacks), []).append(one.task)
    return [f"Not fine-tuned on {', '.join(names)}: {titles}." for titles, names in tasks.items()]


def _gain_column(results: Sequence[EntryResult]) -> Columns:
    def cell(result: EntryResult) -> str:
        gain = gain_over_no_mixer(result, results)
        return "" if gain is None else f"{gain:.3f}"

    if not any(result.entry.control == "no mixer" for result in results):
        return {}
    return {"gain over no mixer (nats)": cell}


def _runs(result: EntryResult) -> str:
    done = len(result.values("loss"))
    return f"{done}" if done == len(result.runs) else f"{done} of {len(result.runs)}"


def _mean(result: EntryResult, metric: str, digits: int, *, scale: float = 1) -> str:
    return mean_in_words(result.values(metric), digits, scale=scale)


def _headdims(model: ModelConfig) -> str:
    return ", ".join(str(headdim) for headdim in headdims(model).values())


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
