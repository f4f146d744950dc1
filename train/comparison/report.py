"""Tables and the picture of a comparison: COMPARISON/report/{table.md, table.csv, plot.png}."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from matmix.model.config import ModelConfig
from matmix.model.flops import flops_per_token
from matmix.train.callbacks.progress import short_number
from matmix.train.comparison.config import Comparison
from matmix.train.comparison.picture import picture
from matmix.train.comparison.results import EntryResult, Spread, collect, spread, unnamed_folders
from matmix.train.comparison.settings import changed_headdims, words_on_differences
from matmix.train.comparison.speed import speed_words
from matmix.train.comparison.width import headdims
from matmix.train.files import write_whole


def plan_text(comparison: Comparison) -> str:
    """What would be trained: widths, parameters, cost."""
    rows = []
    for entry in comparison.entries:
        config = entry.config
        flops = flops_per_token(config.model, config.data.seqlen, head_share=config.objective.target_share)
        heads = changed_headdims(entry) or _headdims(config.model)
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
        f"{_count(len(comparison.entries), 'entry', 'entries')} x {_count(len(seeds), 'seed', 'seeds')} "
        f"({', '.join(map(str, seeds))})",
        f"{_count(config.steps, 'step', 'steps')} of {batch} each, {short_number(tokens)} tokens a run",
        f"runs in {comparison.home}",
    ]
    return "\n".join([*lines, *words_on_differences(comparison.entries)])


def write_report(comparison: Comparison) -> str:
    """Writes table and picture of what there is; returns the text to be shown.

    A report that is there stays where no run is finished: an empty one would say less.
    """
    results = collect(comparison)
    folder = comparison.home / "report"
    text = table_text(comparison, results)
    files = folder / "table.md", folder / "table.csv", folder / "plot.png"
    if not any(result.values("loss") for result in results) and files[0].is_file():
        return f"{text}\n\nNo run of this table is finished: {folder} is left as it was."
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in zip(files, (text + "\n", table_csv(results), picture(results)), strict=True):
        write_whole(path, content)
    return f"{text}\n\n{', '.join(map(str, files))}"


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
    several = any(len(result.values("loss")) > 1 for result in results)
    about = "Mean ± sample standard deviation over n seeds; loss in nats per token."
    lines = [markdown(columns, rows), "", about if several else "Loss in nats per token."]
    lines += [*speed_words(comparison), *words_on_differences(comparison.entries)]
    runs = [(f"{result.entry.name} seed {run.seed}", run) for result in results for run in result.runs]
    if others := [f"{title} ({run.others})" for title, run in runs if run.others]:
        lines.append(f"Left out, since trained with other settings: {', '.join(others)}.")
    if open_runs := [f"{title} ({run.state})" for title, run in runs if not (run.validation or run.others)]:
        lines.append(f"Not finished: {', '.join(open_runs)}.")
    if folders := unnamed_folders(comparison):
        lines.append(f"Also in {comparison.home}, but not in the recipe: {', '.join(folders)}.")
    return "\n".join(lines)


def table_csv(results: Sequence[EntryResult]) -> str:
    """The same, unrounded, and each seed's own values."""
    metric, _ = _second_metric(results)
    seeds = [run.seed for run in results[0].runs]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [f"{name}_{part}" for name in ("loss", metric) for part in ("mean", "deviation")]
    header = ["entry", "parameters", "d_model", "headdim", *names, "n", "tokens_per_second", "peak_bytes"]
    writer.writerow([*header, *(f"{name}_seed_{seed}" for name in ("loss", metric) for seed in seeds)])
    for result in results:
        model = result.entry.config.model
        heads = _headdims(model).replace(",", "")
        statistics = []
        for name in ("loss", metric):
            found = spread(result.values(name))
            statistics += ["", ""] if found is None else [found.mean, found.deviation]
        ends = [len(result.values("loss")), result.tokens_per_second, result.peak_bytes]
        own = [run.validation.get(name) for name in ("loss", metric) for run in result.runs]
        writer.writerow([result.entry.name, result.entry.parameters, model.d_model, heads, *statistics, *ends, *own])
    return text.getvalue()


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table whose columns stand below each other also as plain text."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
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


def _headdims(model: ModelConfig) -> str:
    return ", ".join(str(headdim) for headdim in headdims(model).values())


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
