"""The results of a comparison, read from its runs: COMPARISON/report/{table.md, table.csv, plot.png}."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Literal, TypeVar

from matmix.data.storage.files import write_atomic
from matmix.launch.figures import panels, png_of
from matmix.launch.lab.compare.config import Comparison, Control, Entry, tasks_of
from matmix.launch.lab.compare.downstream import (
    Finetuned,
    ScoreColumn,
    Scores,
    kept_downstream,
    score_columns,
    scores_of,
)
from matmix.launch.lab.compare.speed import current_rows, speed_words
from matmix.launch.lab.compare.width import changed_headdims, headdims, words_on_differences
from matmix.launch.many.planned import PlannedRun, other_settings
from matmix.launch.many.runs import training_records
from matmix.launch.many.scores import markdown, mean_in_words, metric_in_words, spread
from matmix.model.config import ModelConfig
from matmix.train.evaluators.base import averaged_metrics
from matmix.train.tasks import unit_of
from matmix.train.words import short_number


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run."""

    seed: int
    state: Literal["finished", "unfinished", "missing", "other settings"]
    validation: dict[str, float]
    """Metrics of the last step; {} unless finished."""
    curve: list[tuple[int, float]]
    """(step, training loss) of each record; [] of a run with other settings."""
    others: str = ""
    """In which settings it differs from what is compared here."""
    finetuned: Scores = dataclasses.field(default_factory=dict)
    """Its scores on tasks, those of each of its fine-tunings."""

    @property
    def metrics(self) -> dict[str, float]:
        """All that is known of it; of scores on tasks the mean over its fine-tunings."""
        return {**self.validation, **{name: fmean(values) for name, values in self.finetuned.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EntryResult:
    """One entry with all its seeds."""

    entry: Entry
    runs: list[RunResult]
    tokens_per_second: float | None
    peak_bytes: float | None

    def values(self, metric: str) -> list[float]:
        """A metric of the finished runs, by seed; a score on a task of all their fine-tunings."""
        found = []
        for run in self.runs:
            found += run.finetuned.get(metric, [run.validation[metric]] if metric in run.validation else [])
        return found

    def mean(self, metric: str) -> float | None:
        """Its mean over seeds; None where no finished run has it."""
        found = spread(self.values(metric))
        return None if found is None else found.mean

    def ranked_loss(self) -> float | None:
        """Its mean loss, to sort by: NaN, from states that overflow on some text, is infinite and so the worst."""
        loss = self.mean("loss")
        return math.inf if loss is not None and math.isnan(loss) else loss

    @property
    def is_finished(self) -> bool:
        return all(run.state == "finished" for run in self.runs)


def collect(comparison: Comparison) -> list[EntryResult]:
    """All entries of a comparison without variants, or of one of them: the best first, those without a finished run
    last. The best: on generated tasks by accuracy, at the training length and then at longer ones; else by loss."""
    speeds = current_rows(comparison)
    tasks, downstream = tasks_of(comparison), kept_downstream(comparison.home)
    found = []
    for entry in comparison.entries:
        speed = speeds.get(entry.name, {})
        result = EntryResult(
            entry=entry,
            runs=[read_run(task, downstream) for task in tasks if task.entry == entry.title],
            tokens_per_second=speed.get("tokens_per_second"),
            peak_bytes=speed.get("peak_bytes"),
        )
        found.append(result)
    accuracies = accuracy_metrics(found).values()

    def place(result: EntryResult) -> tuple[float, ...]:
        if not result.values("loss"):
            return (1.0,)
        return 0.0, *(-(result.mean(metric) or 0.0) for metric in accuracies), result.ranked_loss()

    return sorted(found, key=place)


def accuracy_metrics(results: Sequence[EntryResult]) -> dict[int, str]:
    """Length as a multiple of the training length -> accuracy there, of generated tasks; {} for what is no such task,
    where chance is not known."""
    metrics = metrics_of(results)
    if "chance_accuracy" not in metrics:
        return {}
    found = {int(match[1] or 1): match[0] for name in metrics if (match := re.fullmatch(r"accuracy(?:_x(\d+))?", name))}
    return dict(sorted(found.items()))


def position_metrics(results: Sequence[EntryResult]) -> dict[str, str]:
    """Bin of positions in the document, such as "4-7" -> loss there, the first bin first."""
    names = [name for name in metrics_of(results) if name.startswith("position_loss/")]
    found = {name.removeprefix("position_loss/"): name for name in names}
    return dict(sorted(found.items(), key=lambda item: int(re.match(r"\d+", item[0])[0])))


def metrics_of(results: Sequence[EntryResult]) -> list[str]:
    """All metrics of the finished runs, in the order in which they are recorded."""
    return list(dict.fromkeys(name for result in results for run in result.runs for name in run.metrics))


def gain_over_no_mixer(result: EntryResult, results: Sequence[EntryResult]) -> float | None:
    """Mean loss of the control without mixers minus the entry's own; None of a control and where either is missing."""
    without = next((other.mean("loss") for other in results if other.entry.control == "no mixer"), None)
    own = result.mean("loss")
    return None if without is None or own is None or result.entry.control == "no mixer" else without - own


def unnamed_folders(comparison: Comparison) -> list[str]:
    """Folders of runs that lie there and that the recipe does not name: other entries, other seeds."""
    named = {task.run.path for task in tasks_of(comparison)}
    depths = ("*/seed-*/config.toml", "*/*/seed-*/config.toml")
    found = {path.parent for depth in depths for path in comparison.home.glob(depth)} - named
    return sorted(str(path.relative_to(comparison.home)) for path in found)


def read_run(task: PlannedRun, downstream: Sequence[Finetuned]) -> RunResult:
    """A run as it stands, with its scores on tasks. One with other settings has no numbers here: they belong to another
    comparison."""
    if others := other_settings(task):
        return RunResult(seed=task.seed, state="other settings", validation={}, curve=[], others=others)
    finished = task.is_finished()
    summary = task.run.read_summary() if finished else None
    begun = (task.run.path / "metrics.jsonl").is_file()
    return RunResult(
        seed=task.seed,
        state="finished" if finished else "unfinished" if begun else "missing",
        validation={} if summary is None else summary["validation"],
        curve=[
            (record["step"], record["loss"])
            for record in training_records(task.run.path / "metrics.jsonl")
            if record["loss"] is not None  # every step of it was skipped
        ],
        finetuned=scores_of(task, downstream) if finished else {},
    )


_SMOOTH = 0.05  # share of the records over which the curves of the training loss are averaged
_NAME_WIDTH = 26  # characters of a name on a line
_MARKERS = ("o", "s", "^", "D", "v", "P")
_MARKS = 8  # of a curve
_CONTROLS: dict[Control, dict[str, Any]] = {
    "no mixer": {"color": "0.5", "marker": "x"},
    "convolution only": {"color": "black", "marker": "+"},
}

Panel = tuple[Callable[..., None], int]
"""What draws results into axes, and its width."""


def picture(results: Sequence[Sequence[EntryResult]]) -> bytes:
    """A PNG; results: those of each variant."""
    rows = [_panels(found) for found in results]
    widths = [width for _, width in max(rows, key=len)]
    height = 1.8 + 0.34 * max(8, len(results[0]))
    size = 2.6 * sum(widths), height * len(rows)
    figure, grid = panels(size, len(rows), len(widths), width_ratios=widths)
    names = [entry.name for entry in sorted((r.entry for r in results[0]), key=lambda e: (bool(e.control), e.name))]
    for found, drawn, axes in zip(results, rows, grid, strict=True):
        looks = [style(names.index(result.entry.name), result.entry.control) for result in found]
        for (draw, _), one in zip(drawn, axes, strict=False):
            draw(one, found, looks)
        for one in axes[len(drawn) :]:
            one.set_axis_off()
        axes[0].set_title(found[0].entry.variant)
    return png_of(figure)


def _panels(results: Sequence[EntryResult]) -> list[Panel]:
    panels: list[Panel] = [(_draw_accuracies if accuracy_metrics(results) else _draw_losses, 2), (_draw_curves, 3)]
    return [*panels, (_draw_positions, 2)] if len(position_metrics(results)) > 1 else panels


def _draw_losses(axes: Any, results: Sequence[EntryResult], looks: Sequence[dict[str, Any]]) -> None:
    """Every seed and the mean."""
    for place, (result, look) in enumerate(zip(results, looks, strict=True)):
        losses = spread(result.values("loss"))
        if losses is not None:
            axes.errorbar(losses.mean, place, xerr=losses.deviation, capsize=4, linestyle="", **look)
            axes.plot(result.values("loss"), [place] * losses.count, "|", markersize=9, color=look["color"])
    axes.set_yticks(range(len(results)), [_wrapped(result.entry.label) for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_xlabel(f"validation loss ({_unit(results)}):\nmean, standard deviation, each seed")


def _draw_accuracies(axes: Any, results: Sequence[EntryResult], looks: Sequence[dict[str, Any]]) -> None:
    """The mean over seeds at each length, and chance."""
    lengths = accuracy_metrics(results)
    for place, (result, look) in enumerate(zip(results, looks, strict=True)):
        found = {length: mean for length, metric in lengths.items() if (mean := result.mean(metric)) is not None}
        accuracies = [100 * mean for mean in found.values()]
        axes.plot(list(found), accuracies, **line(place, result, len(results)), **look)
    chance = [value for result in results for value in result.values("chance_accuracy")]
    axes.axhline(100 * sum(chance) / len(chance), color="0.5", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [f"{length}x" for length in lengths])
    axes.set_ylim(-2, 102)
    axes.set_xlabel("length, as a multiple of that in training\n(dotted: chance)")
    axes.set_ylabel("accuracy (%), mean over seeds")


def _draw_curves(axes: Any, results: Sequence[EntryResult], looks: Sequence[dict[str, Any]]) -> None:
    for place, (result, look) in enumerate(zip(results, looks, strict=True)):
        if curve := mean_curve(result):
            apart = max(1, len(curve) // _MARKS)
            marks = (round(apart * place / len(results)) % apart, apart)  # not on top of each other
            axes.plot(*zip(*curve, strict=True), **line(place, result, len(results)), markevery=marks, **look)
            axes.lines[-1].set_label(_wrapped(label(result)))
    axes.ticklabel_format(style="plain", useOffset=False)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss ({_unit(results)}),\nrunning mean, over seeds")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, ncols=2)


def _draw_positions(axes: Any, results: Sequence[EntryResult], looks: Sequence[dict[str, Any]]) -> None:
    """The mean over seeds in each bin."""
    bins = position_metrics(results)
    for place, (result, look) in enumerate(zip(results, looks, strict=True)):
        means = [(number, result.mean(metric)) for number, metric in enumerate(bins.values())]
        if known := [(number, mean) for number, mean in means if mean is not None]:
            axes.plot(*zip(*known, strict=True), **line(place, result, len(results)), **look)
    axes.set_xticks(range(len(bins)), list(bins), rotation=45)
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel(f"validation loss ({_unit(results)}),\nmean over seeds")


def _unit(results: Sequence[EntryResult]) -> str:
    """Returns the unit of the loss."""
    return results[0].entry.config.task().loss_metric.unit


def style(place: int, control: Control | None = None) -> dict[str, Any]:
    """Colour and marker: no two of the first 16 places are alike; controls have their own."""
    from matplotlib import colormaps

    if control is not None:
        return {**_CONTROLS[control], "markersize": 5}
    colours = colormaps["Dark2"].colors
    return {
        "color": colours[place % len(colours)],
        "marker": _MARKERS[(place + place // len(colours)) % len(_MARKERS)],
        "markersize": 5,
    }


def line(place: int, result: EntryResult, entries: int) -> dict[str, Any]:
    """How a curve is drawn: the later ones thinner, so that those below them are seen; controls dashed, and dotted what
    is not finished."""
    return {
        "linewidth": 3.2 - 2.2 * place / max(1, entries - 1),
        "linestyle": ":" if not result.is_finished else "--" if result.entry.control else "-",
    }


def label(result: EntryResult) -> str:
    """Returns the words of the legend; of runs that are not finished also how many are."""
    name = result.entry.label
    if result.is_finished:
        return name
    done = sum(run.state == "finished" for run in result.runs)
    return f"{name} ({done} of {len(result.runs)} finished)"


def mean_curve(result: EntryResult) -> list[tuple[int, float]]:
    """(step, training loss): the mean over seeds at the steps that all begun runs recorded, then a running mean."""
    curves = [dict(run.curve) for run in result.runs if run.curve]
    if not curves:
        return []
    steps = sorted(set(curves[0]).intersection(*curves[1:]))
    means = [sum(curve[step] for curve in curves) / len(curves) for step in steps]
    window = max(1, round(_SMOOTH * len(means)))
    smooth = [sum(part) / len(part) for part in (means[max(0, i - window + 1) : i + 1] for i in range(len(means)))]
    return list(zip(steps, smooth, strict=True))


def _wrapped(name: str) -> str:
    return textwrap.fill(name.replace("$", r"\$"), _NAME_WIDTH)


Row = TypeVar("Row")
Columns = dict[str, Callable[[EntryResult], str]]
"""Heading of a column -> what it says of an entry."""


def plan_text(comparison: Comparison) -> str:
    """Returns lines that tell what would be trained: widths, parameters, cost."""
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
    """Returns the columns of language models and encoders: their second measure, and what context bought."""
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
    """Returns the columns of encoders that have been fine-tuned: their scores on each task, and means over several."""
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
