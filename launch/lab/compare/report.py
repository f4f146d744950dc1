"""The results of a comparison, read from its runs: COMPARISON/report/{table.md, table.csv, plot.png}."""

import dataclasses
import functools
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from matmix.launch.figures import panels, png_of
from matmix.launch.lab.compare.config import Comparison, Control, Entry, tasks_of
from matmix.launch.lab.compare.downstream import Finetuned, kept_downstream, score_columns, scores_of
from matmix.launch.lab.compare.published import agreement, agreement_words
from matmix.launch.lab.compare.speed import current_rows, speed_words
from matmix.launch.lab.compare.tuning import plan_words, tuned, tuning_table, why_not_tuned
from matmix.launch.lab.compare.width import changed_headdims, words_on_differences
from matmix.launch.many.planned import OTHER_SETTINGS, PlannedRun, on_other_data, why_open
from matmix.launch.many.runs import training_records
from matmix.launch.many.scores import ScoreColumn, csv_of, markdown, spread, write_tables
from matmix.model.build import headdims
from matmix.model.config import ModelConfig
from matmix.train.evaluators.base import averaged_metrics
from matmix.train.evaluators.context import PREFIX as POSITION_LOSS
from matmix.train.tasks import unit_of
from matmix.train.words import short_number

LOSS = ScoreColumn("loss", "validation loss", digits=4, scale=1)
GAIN = ScoreColumn("gain_over_no_mixer", "gain over no mixer (nats)", digits=3, scale=1)
OVER_DI = "over_di/"
GAIN_OVER_DI = ScoreColumn(f"{OVER_DI}loss", "gain over DI (nats)", digits=3, scale=1)
OTHER_DATA = "trained on other data than most of the runs"
SPEEDS = ("tokens_per_second", "peak_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run as it stands."""

    seed: int
    why: str = ""
    """Why it has no numbers: missing, unfinished, or in which settings it differs from what is compared here."""
    values: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    """Metric -> its value in the last step; score on a task -> those of all fine-tunings."""
    curve: Sequence[tuple[int, float]] = ()
    """(step, training loss) of each record."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EntryResult:
    """One entry with all its seeds."""

    entry: Entry
    runs: Sequence[RunResult]
    speed: Mapping[str, Any]
    """Its row in speed.json; {} where it was not measured."""
    gain: list[float] = dataclasses.field(default_factory=list)
    """Mean loss of `Part.without_mixers` minus its own; [] of that entry, and where either is missing."""
    over_di: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of a data-dependent matrix, NAME_dd: how much better than those with NAME_di its mean loss and means over tasks
    are; without what either lacks."""

    def values(self, metric: str) -> list[float]:
        """A metric of the finished runs, by seed; a score on a task of all their fine-tunings."""
        if metric == GAIN.key:
            return self.gain
        if metric.startswith(OVER_DI):
            better = self.over_di.get(metric.removeprefix(OVER_DI))
            return [] if better is None else [better]
        return [value for run in self.runs for value in run.values.get(metric, ())]

    def mean(self, metric: str) -> float | None:
        """Its mean over seeds; None where no finished run has it."""
        return fmean(values) if (values := self.values(metric)) else None

    def words(self, column: ScoreColumn) -> str:
        return column.words(self.values(column.key))

    def ranked_loss(self) -> float | None:
        """Its mean loss, to sort by: NaN, from states that overflow on some text, is infinite and so the worst."""
        loss = self.mean("loss")
        return math.inf if loss is not None and math.isnan(loss) else loss

    @property
    def mixer(self) -> str:
        """The mixer of all layers; empty where they are not alike."""
        names = self.entry.config.model.mixer_names()
        return names[0] if len(names) == 1 else ""

    @property
    def is_finished(self) -> bool:
        return not any(run.why for run in self.runs)

    @property
    def without_a_number(self) -> list[str]:
        """Returns which runs have no number, and why, as in "seeds 1, 2 (missing)"."""
        seeds: dict[str, list[str]] = {}
        for run in self.runs:
            if run.why:
                seeds.setdefault(run.why, []).append(str(run.seed))
        return [f"seed{'s' * (len(of) > 1)} {', '.join(of)} ({why})" for why, of in seeds.items()]

    def count_words(self) -> str:
        """Returns how many runs are finished, as in "2" or "1 of 2"."""
        done = len(self.values("loss"))
        return f"{done}" if done == len(self.runs) else f"{done} of {len(self.runs)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Holds the results of a variant; without variants, of the comparison."""

    comparison: Comparison
    downstream: Sequence[Finetuned]
    results: Sequence[EntryResult]

    @property
    def variant(self) -> str:
        return self.comparison.entries[0].variant

    @functools.cached_property
    def metrics(self) -> list[str]:
        """All metrics of the finished runs, in the order in which they are recorded."""
        return list(dict.fromkeys(name for result in self.results for run in result.runs for name in run.values))

    @functools.cached_property
    def accuracies(self) -> dict[int, str]:
        """Length as a multiple of the training length -> accuracy there; {} where no task was generated."""
        if "chance_accuracy" not in self.metrics:
            return {}
        matches = filter(None, (re.fullmatch(r"accuracy(?:_x(\d+))?", name) for name in self.metrics))
        return dict(sorted((int(match[1] or 1), match[0]) for match in matches))

    @property
    def chance(self) -> float:
        """Returns the accuracy of guessing, of generated tasks."""
        return fmean(value for result in self.results for value in result.values("chance_accuracy"))

    @property
    def without_mixers(self) -> Entry | None:
        """Returns the entry that gains are over: of those without mixers the one named so, else the first."""
        found = [entry for entry in self.comparison.entries if entry.control == "no mixer"]
        return min(found, key=lambda entry: entry.name != "no mixer", default=None)

    @property
    def gains(self) -> list[ScoreColumn]:
        """Returns the columns of the gains over no mixer and of data-dependent over data-independent matrices of one
        class, where these are among the entries."""
        columns = [GAIN] if self.without_mixers else []
        return [*columns, *([GAIN_OVER_DI] if any("loss" in one.over_di for one in self.results) else [])]

    @functools.cached_property
    def positions(self) -> dict[str, str]:
        """Bin of positions in the document, such as "4-7" -> loss there, the first bin first."""
        names = [name for name in self.metrics if name.startswith(POSITION_LOSS)]
        bins = {name.removeprefix(POSITION_LOSS): name for name in names}
        return dict(sorted(bins.items(), key=lambda item: int(item[0].partition("-")[0])))


def collect(comparison: Comparison, others: Collection[PlannedRun] = ()) -> Part:
    """Reads all entries of a comparison, or of one of its variants: the best first, those without a finished run last.
    The best: on generated tasks by accuracy, at the training length and then at longer ones; else by loss. others:
    runs that were trained on other data than most, which have no numbers here."""
    runs: dict[str, list[RunResult]] = {}
    tasks = tasks_of(comparison)
    speeds, downstream = current_rows(comparison), kept_downstream(comparison.home, tasks)
    for task in tasks:
        run = RunResult(seed=task.seed, why=OTHER_DATA) if task in others else read_run(task, downstream)
        runs.setdefault(task.entry, []).append(run)
    for entry in comparison.entries:
        if not entry.is_ready:
            why = why_not_tuned(comparison, entry)
            runs[entry.title] = [RunResult(seed=seed, why=why) for seed in comparison.settings.seeds]
    results = [
        EntryResult(entry=entry, runs=runs[entry.title], speed=speeds.get(entry.name, {}))
        for entry in comparison.entries
    ]
    part = Part(comparison=comparison, downstream=downstream, results=results)
    control = part.without_mixers
    without = next((one.mean("loss") for one in results if one.entry is control), None)
    for one in results:
        if None not in (without, own := one.mean("loss")) and one.entry is not control:
            one.gain.append(without - own)
    by_mixer = {one.mixer: one for one in results}
    averages = [column.key for column in score_columns(downstream) if not column.task]
    for one in results:
        fixed = by_mixer.get(f"{one.mixer.removesuffix('_dd')}_di") if one.mixer.endswith("_dd") else None
        for metric in ("loss", *averages) if fixed else ():
            if None not in (before := fixed.mean(metric), own := one.mean(metric)):
                one.over_di[metric] = before - own if metric == "loss" else own - before
    accuracies = part.accuracies.values()

    def place(result: EntryResult) -> tuple[float, ...]:
        if not result.values("loss"):
            return (1.0,)
        return 0.0, *(-(result.mean(metric) or 0.0) for metric in accuracies), result.ranked_loss()

    results.sort(key=place)
    return part


def read_run(task: PlannedRun, downstream: Sequence[Finetuned]) -> RunResult:
    """Reads a run as it stands. One with other settings has no numbers here: they belong to another comparison."""
    why, records = why_open(task), training_records(task.run.path / "metrics.jsonl")
    if why.startswith(OTHER_SETTINGS):
        return RunResult(seed=task.seed, why=why)
    # None is the loss of a record whose steps were all skipped.
    curve = [(one["step"], one["loss"]) for one in records if one["loss"] is not None]
    if why:
        return RunResult(seed=task.seed, why=why, curve=curve)
    values = {name: [value] for name, value in task.run.read_summary()["validation"].items()}
    return RunResult(seed=task.seed, values=values | scores_of(task, downstream), curve=curve)


# -- tables -----------------------------------------------------------------------------------------------------------


def plan_text(comparison: Comparison) -> str:
    """Returns lines that tell what would be trained: widths, parameters, cost."""
    parts, seeds = comparison.by_variant(), comparison.settings.seeds
    sections = [_plan_of_variant(part.entries) for part in parts]
    counts = [counted(len(parts[0].entries), "entry", "entries")]
    if parts[0].entries[0].variant:
        counts.append(counted(len(parts), "variant", "variants"))
        sections = [f"{part.entries[0].variant}:\n{text}" for part, text in zip(parts, sections, strict=True)]
    counts.append(seeds_words(seeds))
    lines = [" x ".join(counts), *plan_words(comparison), _cost_words(comparison), f"runs in {comparison.home}"]
    return "\n\n".join([*sections, "\n".join(lines)])


def _cost_words(comparison: Comparison) -> str:
    """Says what all runs of a comparison cost; a training step takes three times the FLOPs of the forward pass."""
    tries, units, flops = comparison.settings.grid_size, 0, 0
    each = len(comparison.settings.seeds) + tries
    for entry in comparison.entries:
        config, task = entry.config, entry.config.task()
        count = each * config.steps * config.global_batch_size * task.units(config.data.seqlen)
        units, flops = units + count, flops + 3 * count * task.flops(config.model, config.data.seqlen)
    unit = comparison.entries[0].config.task().unit
    runs, least = each * len(comparison.entries), "at least " if tries else ""
    return f"in all {least}{counted(runs, 'run', 'runs')}: {short_number(units)} {unit}, {short_number(flops)} FLOPs"


def _plan_of_variant(entries: Sequence[Entry]) -> str:
    config = entries[0].config
    task = config.task()
    rows = []
    for entry in entries:
        model = entry.config.model
        heads = changed_headdims(entry) or _headdims(model)
        flops = entry.config.task().flops(model, entry.config.data.seqlen)
        sizes = [f"{entry.parameters:,}", f"{entry.parameters / entry.target - 1:+.2%}", short_number(flops)]
        rows.append([entry.label, str(model.d_model), heads, *sizes])
    headings = ["entry", "d_model", "headdim", "parameters", "off by", f"forward FLOPs per {task.unit[:-1]}"]
    units = config.steps * config.global_batch_size * task.units(config.data.seqlen)
    batch = f"{config.global_batch_size:,} {task.unit}"
    if task.unit == "tokens":
        batch = f"{config.global_batch_size:,} sequences of {config.data.seqlen:,} tokens"
    steps = f"{counted(config.steps, 'step', 'steps')} of {batch} each, {short_number(units)} {task.unit} a run"
    return "\n".join([markdown(headings, rows), "", steps, *words_on_differences(entries)])


def write_report(comparison: Comparison) -> str:
    """Writes table and picture of what there is; returns the text to be shown."""
    comparison, idle = begun(tuned(comparison))
    others = on_other_data(tasks_of(comparison))
    parts = [collect(part, others) for part in comparison.by_variant()]
    files = {"table.csv": table_csv(parts), "plot.png": picture(parts)}
    is_empty = not any(result.values("loss") for part in parts for result in part.results)
    text = _report_text(comparison, parts)
    return write_tables(comparison.home / "report", text, files, is_empty=is_empty, idle=idle)


def begun(comparison: Comparison) -> tuple[Comparison, list[str]]:
    """Returns the comparison without the entries of which nothing has begun in any variant and the variants in which
    nothing has begun of any entry, and the names of these. All stay where nothing has begun at all."""
    there = [entry for entry in comparison.entries if (comparison.home / entry.folder).exists()]
    if not there:
        return comparison, []
    names, variants = {entry.name for entry in there}, {entry.variant for entry in there}
    kept = tuple(entry for entry in comparison.entries if entry.name in names and entry.variant in variants)
    every = [entry.name for entry in comparison.entries] + [entry.variant for entry in comparison.entries]
    idle = list(dict.fromkeys(name for name in every if name not in names | variants))
    return dataclasses.replace(comparison, entries=kept), idle


def _report_text(comparison: Comparison, parts: Sequence[Part]) -> str:
    """Writes all tables in Markdown: with variants first a summary, then one for each."""
    tables = [table_text(part, is_first=part is parts[0]) for part in parts]
    if parts[0].variant:
        named = [f"## {part.variant}\n\n{table}" for part, table in zip(parts, tables, strict=True)]
        tables = [summary_text(parts), *named]
    home, ours = comparison.home, {task.run.path for task in tasks_of(comparison)}
    there = {path.parent for depth in ("*", "*/*") for path in home.glob(f"{depth}/seed-*/config.toml")}
    if folders := sorted(str(path.relative_to(home)) for path in there - ours):
        tables[-1] += f"\n\nAlso in {home}, but not in the recipe: {', '.join(folders)}."
    return "\n\n".join(tables)


def table_text(part: Part, *, is_first: bool = True) -> str:
    """Writes the table of a variant and what is to be known about its numbers. Speed is measured in the first one."""
    comparison, results = part.comparison, part.results
    unit, scores = unit_of(comparison.entries[0].config.objective.name), score_columns(part.downstream)
    columns = [*_columns(part), *(one for one in scores if one.key in part.metrics)]
    for one in scores:
        if any(one.key in result.over_di for result in results):
            heading = f"{one.heading.removesuffix(' (%)')}, over DI (%)"
            columns.append(one._replace(key=f"{OVER_DI}{one.key}", heading=heading))
    headings = ["entry", "parameters", "d_model", *(column.heading for column in columns), "n"]
    rows = []
    for result in results:
        sizes = [f"{result.entry.parameters:,}", str(result.entry.config.model.d_model)]
        rows.append([result.entry.label, *sizes, *map(result.words, columns), result.count_words()])
    speeds = speed_words(comparison) if is_first or current_rows(comparison) else []
    if speeds:
        headings += [f"{unit}/s", "peak memory (MiB)"]
        for result, row in zip(results, rows, strict=True):
            speed, peak = (result.speed.get(name) for name in SPEEDS)
            row += ["" if speed is None else f"{speed:,.0f}", "" if peak is None else f"{peak / 2**20:,.0f}"]
    several = any(len(result.values("loss")) > 1 for result in results)
    loss = f"loss in nats per {unit[:-1]}."
    about = f"Mean ± sample standard deviation over n seeds; {loss}" if several else loss.capitalize()
    lines = [markdown(headings, rows), "", about]
    if part.accuracies:
        lines.append(f"Accuracy at multiples of the training length; chance {100 * part.chance:.1f} %.")
    if GAIN in columns and part.without_mixers.name != "no mixer":
        lines.append(f"Gains are over {part.without_mixers.name}.")
    lines += published_lines(part)
    for one in part.downstream:
        if any(column in columns for column in one.columns):
            lines += one.lines(tasks_of(comparison))
    lines += [*speeds, *words_on_differences(comparison.entries)]
    runs = [(f"{result.entry.name} seed {run.seed}", run) for result in results for run in result.runs]
    if without := [f"{result.entry.name} {words}" for result in results for words in result.without_a_number]:
        lines.append(f"Without a number: {'; '.join(without)}.")
    lacking: dict[str, list[str]] = {}
    for one in scores:
        titles = [title for title, run in runs if run.values and len(run.values.get(one.key, ())) < one.runs]
        if one.task and titles:
            lacking.setdefault(", ".join(titles), []).append(one.task)
    lines += [f"Not fine-tuned on {', '.join(lacks)}: {who}." for who, lacks in lacking.items()]
    return "\n".join([*lines, *(["", table] if (table := tuning_table(comparison)) else [])])


def published_lines(part: Part) -> list[str]:
    """Says how many pairs of entries stand in the published order; [] where the recipe gives none."""
    settings, metric = part.comparison.settings, part.comparison.settings.published_metric
    if not settings.published:
        return []
    if part.metrics and metric not in part.metrics:
        return [f"Published order: no run has a metric called {metric}, as comparison.published_metric is."]
    found = agreement(settings.published, {one.entry.name: one.values(metric) for one in part.results})
    task = part.comparison.entries[0].config.task()
    title = next((known.title for known in (task.loss_metric, *task.metrics) if known.name == metric), metric)
    return [agreement_words(settings.published_source, title, found)]


def summary_text(parts: Sequence[Part]) -> str:
    """Writes a row for each entry over all variants: accuracy at the training length and at the longest, or the loss
    and its distance from no mixer. The best on average first, those that lack a variant last."""
    headings = ["entry"]
    rows = {entry.name: [entry.label] for entry in parts[0].comparison.entries}
    merits: dict[str, list[float]] = {name: [] for name in rows}
    for part in parts:
        columns = [LOSS._replace(heading="loss"), *part.gains]
        if part.accuracies:
            columns = [_columns(part)[place] for place in sorted({0, len(part.accuracies) - 1})]
        headings += [f"{part.variant}: {column.heading}" for column in columns]
        for result in part.results:
            rows[result.entry.name] += map(result.words, columns)
            if result.values("loss"):
                merit = result.mean("accuracy") if part.accuracies else -result.ranked_loss()
                merits[result.entry.name].append(merit)
    names = sorted(rows, key=lambda name: (-len(merits[name]), -fmean(merits[name] or [0.0])))
    return markdown(headings, [rows[name] for name in names])


def table_csv(parts: Sequence[Part]) -> str:
    """Writes the same of all variants, unrounded, with all metrics and each seed's own values."""
    metrics = list(dict.fromkeys(["loss", *(name for part in parts for name in part.metrics)]))
    return csv_of([_csv_row(result, metrics) for part in parts for result in part.results])


def _csv_row(result: EntryResult, metrics: Sequence[str]) -> dict[str, Any]:
    entry, model = result.entry, result.entry.config.model
    row = {"entry": entry.name, "variant": entry.variant, "control": entry.control}
    row |= {"parameters": entry.parameters, "d_model": model.d_model, "headdim": _headdims(model).replace(",", "")}
    for name in metrics:
        over = spread(result.values(name))
        row[f"{name}_mean"], row[f"{name}_deviation"] = (over.mean, over.deviation) if over else (None, None)
    row |= {GAIN.key: result.mean(GAIN.key), "gain_over_di": result.mean(GAIN_OVER_DI.key)}
    row |= {"n": len(result.values("loss"))}
    row |= {name: result.speed.get(name) for name in SPEEDS}
    row |= {f"tuned/{key}": dict(entry.chosen).get(key) for key in entry.tunes}
    for name in metrics:
        each = {run.seed: run.values.get(name) for run in result.runs}
        row |= {f"{name}_seed_{seed}": fmean(values) if values else None for seed, values in each.items()}
    return row


def _columns(part: Part) -> list[ScoreColumn]:
    """The columns of metrics: accuracies at multiples of the length, first of all, or what context bought."""
    columns = [ScoreColumn(metric, f"accuracy {length}x (%)") for length, metric in part.accuracies.items()]
    if part.accuracies:
        return [*columns, LOSS]
    entries = part.comparison.entries
    metrics = entries[0].config.task().metrics[:1]
    if any(entry.config.ema.decay for entry in entries):
        metrics = (*metrics, *averaged_metrics(metrics))
    columns = [ScoreColumn.of(metric) for metric in metrics]
    context = [ScoreColumn("context_gain", "context gain (nats)", digits=3, scale=1)]
    return [LOSS, *columns, *part.gains, *(context if "context_gain" in part.metrics else [])]


def _headdims(model: ModelConfig) -> str:
    return ", ".join(str(headdim) for headdim in headdims(model).values())


def counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def seeds_words(seeds: Sequence[int]) -> str:
    return f"{counted(len(seeds), 'seed', 'seeds')} ({', '.join(map(str, seeds))})"


# -- picture ----------------------------------------------------------------------------------------------------------

_SMOOTH = 0.05  # share of the records over which the curves of the training loss are averaged
_NAME_WIDTH = 26  # characters of a name on a line
_MARKERS = ("o", "s", "^", "D", "v", "P")
_MARKS = 8  # of a curve
_CONTROLS: dict[Control | None, dict[str, Any]] = {
    "no mixer": {"color": "0.5", "marker": "x"},
    "convolution only": {"color": "black", "marker": "+"},
}
Looks = Sequence[dict[str, Any]]
"""How each entry is drawn."""


def picture(parts: Sequence[Part]) -> bytes:
    """Draws a row of panels for each variant, as a PNG."""
    entries = sorted(parts[0].comparison.entries, key=lambda entry: (bool(entry.control), entry.name))
    names = [entry.name for entry in entries]
    rows = []
    for part in parts:
        row = [(_draw_accuracies if part.accuracies else _draw_losses, 2), (_draw_curves, 3)]
        rows.append([*row, (_draw_positions, 2)] if len(part.positions) > 1 else row)
    widths = [width for _, width in max(rows, key=len)]
    size = 2.6 * sum(widths), (1.8 + 0.34 * max(8, len(names))) * len(rows)
    figure, grid = panels(size, len(rows), len(widths), width_ratios=widths)
    for part, row, axes in zip(parts, rows, grid, strict=True):
        for (draw, _), one in zip(row, axes, strict=False):
            draw(one, part, looks(part, names))
        for one in axes[len(row) :]:
            one.set_axis_off()
        axes[0].set_title(part.variant)
    return png_of(figure)


def looks(part: Part, names: Sequence[str]) -> Looks:
    """Colour and marker by the place in `names`: no two of the first 16 are alike, and controls have their own. A
    matrix of parameters, NAME_di, has those of NAME_dd, and dashes with dots. Later curves are thinner, so that those
    below them are seen; controls dashed, and dotted what is not finished."""
    from matplotlib import colormaps

    colours, last, all_of = colormaps["Dark2"].colors, max(1, len(part.results) - 1), []
    by_mixer = {result.mixer: result.entry.name for result in part.results}
    twins = {
        name: by_mixer[f"{mixer.removesuffix('_di')}_dd"]
        for mixer, name in by_mixer.items()
        if mixer.endswith("_di") and f"{mixer.removesuffix('_di')}_dd" in by_mixer
    }
    distinct = [name for name in names if name not in twins]
    for rank, result in enumerate(part.results):
        name, control = result.entry.name, result.entry.control
        place = distinct.index(twins.get(name, name))
        marker = _MARKERS[(place + place // len(colours)) % len(_MARKERS)]
        look = {"color": colours[place % len(colours)], "marker": marker, **_CONTROLS.get(control, {})}
        style = ":" if not result.is_finished else "--" if control else "-." if name in twins else "-"
        all_of.append({**look, "markersize": 5, "linewidth": 3.2 - 2.2 * rank / last, "linestyle": style})
    return all_of


def _draw_losses(axes: Any, part: Part, looks: Looks) -> None:
    for place, (result, look) in enumerate(zip(part.results, looks, strict=True)):
        losses = spread(result.values("loss"))
        if losses is not None:
            look = {**look, "linestyle": "", "linewidth": 1.5}
            axes.errorbar(losses.mean, place, xerr=losses.deviation, capsize=4, **look)
            axes.plot(result.values("loss"), [place] * losses.count, "|", markersize=9, color=look["color"])
    axes.set_yticks(range(len(part.results)), [_wrapped(result.entry.label) for result in part.results])
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    label = f"validation loss ({_unit(part)}):\nmean, standard deviation, each seed"
    axes.set(ylim=(len(part.results) - 0.5, -0.5), xlabel=label)


def _draw_accuracies(axes: Any, part: Part, looks: Looks) -> None:
    _draw_means(axes, part, looks, {f"{length}x": metric for length, metric in part.accuracies.items()}, 100)
    axes.axhline(100 * part.chance, color="0.5", linewidth=1, linestyle=":")
    axes.set(ylim=(-2, 102), xlabel="length, as a multiple of that in training\n(dotted: chance)")
    axes.set_ylabel("accuracy (%), mean over seeds")


def _draw_positions(axes: Any, part: Part, looks: Looks) -> None:
    _draw_means(axes, part, looks, part.positions)
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel(f"validation loss ({_unit(part)}),\nmean over seeds")


def _draw_means(axes: Any, part: Part, looks: Looks, metrics: Mapping[str, str], scale: float = 1) -> None:
    """Draws the means of these metrics beside each other, as far as they are known; metrics: by their words."""
    for result, look in zip(part.results, looks, strict=True):
        means = {place: result.mean(metric) for place, metric in enumerate(metrics.values())}
        known = {place: scale * mean for place, mean in means.items() if mean is not None}
        axes.plot(list(known), list(known.values()), **look)
    axes.set_xticks(range(len(metrics)), list(metrics), rotation=45)


def _draw_curves(axes: Any, part: Part, looks: Looks) -> None:
    for place, (result, look) in enumerate(zip(part.results, looks, strict=True)):
        if curve := mean_curve(result):
            apart = max(1, len(curve) // _MARKS)
            marks = (round(apart * place / len(part.results)) % apart, apart)  # not on top of each other
            done = "" if result.is_finished else f" ({result.count_words()} finished)"
            label = _wrapped(f"{result.entry.label}{done}")
            axes.plot(*zip(*curve, strict=True), markevery=marks, label=label, **look)
    axes.ticklabel_format(style="plain", useOffset=False)
    axes.set(xlabel="step", ylabel=f"training loss ({_unit(part)}),\nrunning mean, over seeds")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, ncols=2)


def mean_curve(result: EntryResult) -> list[tuple[int, float]]:
    """(step, training loss): the mean over seeds at the steps that all begun runs recorded, then a running mean."""
    curves = [dict(run.curve) for run in result.runs if run.curve]
    steps = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    means = [fmean(curve[step] for curve in curves) for step in steps]
    window = max(1, round(_SMOOTH * len(means)))
    return [(step, fmean(means[max(0, place - window + 1) : place + 1])) for place, step in enumerate(steps)]


def _unit(part: Part) -> str:
    return part.comparison.entries[0].config.task().loss_metric.unit


def _wrapped(name: str) -> str:
    return textwrap.fill(name.replace("$", r"\$"), _NAME_WIDTH)
