"""Tables and the picture of a comparison: COMPARISON/report/{table.md, table.csv, plot.png}."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.model.flops import flops_per_token
from matmix.train.callbacks.progress import short_number
from matmix.train.comparison.config import Comparison, differing_keys
from matmix.train.comparison.results import EntryResult, Spread, collect, spread
from matmix.train.comparison.speed import ROUNDS, read_speed
from matmix.train.comparison.width import headdims

_SMOOTH = 0.05  # share of the records over which the curves of the training loss are averaged


def plan_text(comparison: Comparison) -> str:
    """What would be trained: widths, parameters, cost."""
    rows = []
    for entry in comparison.entries:
        config = entry.config
        flops = flops_per_token(config.model, config.data.seqlen, head_share=config.objective.target_share)
        heads = ", ".join(str(headdim) for headdim in headdims(config.model).values())
        deviation = f"{entry.parameters / comparison.target - 1:+.2%}"
        rows.append(
            [entry.name, str(config.model.d_model), heads, f"{entry.parameters:,}", deviation, short_number(flops)]
        )
    columns = ["entry", "d_model", "headdim", "parameters", "off by", "forward FLOPs per token"]
    config, seeds = comparison.entries[0].config, comparison.settings.seeds
    tokens = config.steps * config.global_batch_size * config.data.seqlen
    batch = f"{config.global_batch_size:,} sequences of {config.data.seqlen:,} tokens"
    lines = [
        markdown(columns, rows),
        "",
        f"{len(comparison.entries)} entries x {len(seeds)} seeds ({', '.join(map(str, seeds))})",
        f"{config.steps:,} steps of {batch} each, {short_number(tokens)} tokens a run",
        f"runs in {comparison.home}",
    ]
    return "\n".join([*lines, *_warnings(comparison)])


def write_report(comparison: Comparison) -> str:
    """Writes table and picture of what there is; returns the text to be shown."""
    results = collect(comparison)
    folder = comparison.home / "report"
    folder.mkdir(parents=True, exist_ok=True)
    text = table_text(comparison, results)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    (folder / "table.csv").write_text(table_csv(results), encoding="utf-8")
    draw(results, folder / "plot.png")
    return f"{text}\n\n{folder / 'table.md'}, {folder / 'table.csv'}, {folder / 'plot.png'}"


def table_text(comparison: Comparison, results: Sequence[EntryResult]) -> str:
    """In Markdown, with what is to be known about the numbers."""
    metric, column = _second_metric(results)
    rows = []
    for result in results:
        scale = 100 if metric == "masked_accuracy" else 1
        digits = 1 if metric == "masked_accuracy" else 3
        done = len(result.values("loss"))
        runs = f"{done}" if done == len(result.runs) else f"{done} of {len(result.runs)}"
        rows.append(
            [
                result.entry.name,
                f"{result.entry.parameters:,}",
                str(result.entry.config.model.d_model),
                _mean(spread(result.values("loss")), 4),
                _mean(spread([scale * value for value in result.values(metric)]), digits),
                runs,
                "" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}",
                "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:,.0f}",
            ]
        )
    columns = ["entry", "parameters", "d_model", "validation loss", column, "n", "tokens/s", "peak memory (MiB)"]
    lines = [markdown(columns, rows), "", "Mean ± sample standard deviation over n seeds; loss in nats per token."]
    lines += [*_speed_words(comparison), *_warnings(comparison)]
    open_runs = [
        f"{r.entry.name} seed {run.seed} ({run.state})" for r in results for run in r.runs if not run.validation
    ]
    if open_runs:
        lines.append(f"Not finished: {', '.join(open_runs)}.")
    return "\n".join(lines)


def table_csv(results: Sequence[EntryResult]) -> str:
    """The same, unrounded, and each seed's own loss."""
    metric, _ = _second_metric(results)
    seeds = [run.seed for run in results[0].runs]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [f"{name}_{part}" for name in ("loss", metric) for part in ("mean", "deviation")]
    header = ["entry", "parameters", "d_model", "headdim", *names, "n", "tokens_per_second", "peak_bytes"]
    writer.writerow([*header, *(f"loss_seed_{seed}" for seed in seeds)])
    for result in results:
        model = result.entry.config.model
        heads = " ".join(str(headdim) for headdim in headdims(model).values())
        statistics = []
        for name in ("loss", metric):
            found = spread(result.values(name))
            statistics += ["", ""] if found is None else [found.mean, found.deviation]
        ends = [len(result.values("loss")), result.tokens_per_second, result.peak_bytes]
        losses = [run.validation.get("loss") for run in result.runs]
        writer.writerow([result.entry.name, result.entry.parameters, model.d_model, heads, *statistics, *ends, *losses])
    return text.getvalue()


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table whose columns stand below each other also as plain text."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _mean(found: Spread | None, digits: int) -> str:
    if found is None:
        return ""
    text = f"{found.mean:.{digits}f}"
    return text if found.deviation is None else f"{text} ± {found.deviation:.{digits}f}"


def _second_metric(results: Sequence[EntryResult]) -> tuple[str, str]:
    masked = results[0].entry.config.objective.name == "masked_lm"
    return ("masked_accuracy", "masked accuracy (%)") if masked else ("bits_per_byte", "bits per byte")


def _speed_words(comparison: Comparison) -> list[str]:
    speed = read_speed(comparison.home)
    if not speed:
        return ["Speed and memory were not measured (matmix compare RECIPE --speed)."]
    where, config = speed["environment"], comparison.entries[0].config
    machine = speed["device"] if speed["device"] != "CPU" else f"{where['processor']}, {where['threads']} threads"
    return [
        f"Speed: training steps of {config.micro_batch(1)} x {config.data.seqlen} tokens side by side, median of "
        f"{ROUNDS} rounds; {machine}, torch {where['torch']}, {where['dtype']}, {where['date'][:10]}. "
        f"Memory: {speed['memory']}."
    ]


def _warnings(comparison: Comparison) -> list[str]:
    keys = differing_keys(comparison.entries)
    return [f"Not alike in all entries: {', '.join(keys)}."] if keys else []


def draw(results: Sequence[EntryResult], path: Path) -> None:
    """Validation losses by entry, every seed and the mean, and training losses over the steps."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # only who draws needs it

    figure = Figure(figsize=(13, 1.8 + 0.34 * max(8, len(results))), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    colours = colormaps["tab20"].colors
    for place, result in enumerate(results):
        style: dict[str, Any] = {"color": colours[place % len(colours)]}
        losses = spread(result.values("loss"))
        if losses is not None:
            left.errorbar(losses.mean, place, xerr=losses.deviation, fmt="o", capsize=4, **style)
            left.plot(result.values("loss"), [place] * losses.count, "|", markersize=9, **style)
        if curve := mean_curve(result):
            line = {"linewidth": 1.6, "linestyle": "-" if place < len(colours) else "--"}
            right.plot(*zip(*curve, strict=True), label=result.entry.name, **line, **style)
    left.set_yticks(range(len(results)), [result.entry.name for result in results])
    left.invert_yaxis()
    left.set_xlabel("validation loss (nats per token):\nmean, standard deviation, each seed")
    right.set_xlabel("step")
    right.set_ylabel("training loss (nats per token), running mean, over seeds")
    for axes in (left, right):
        axes.grid(True, alpha=0.3, linewidth=0.6)
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize=8, ncols=2)
    figure.savefig(path)


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
