"""Draws records of the benchmarks."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matmix.benchmarks.measuring.per_token import ALLOWED


def draw(record: dict[str, Any], path: Path) -> None:
    """Bars of the peers' time and memory over ours, one row a peer, on a logarithmic axis; written to `path` (PNG,
    SVG or PDF)."""
    from matplotlib.figure import Figure  # only who draws needs it

    rows = [
        (f"{title}\nagainst {name}", peer, found["ours"])
        for title, found in record["cases"].items()
        for name, peer in found.items()
        if name != "ours"
    ]
    figure = Figure(figsize=(9, 1 + 0.7 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for offset, key, label in ((-0.2, "seconds", "time"), (0.2, "peak_bytes", "peak memory")):
        values = [peer[key] / max(ours[key], 1e-9) for _, peer, ours in rows]
        bars = axes.barh([place + offset for place in range(len(rows))], values, height=0.38, label=label)
        axes.bar_label(bars, labels=[f"{value:.2g}" for value in values], padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("peer / ours (right of 1: ours takes less)")
    environment = record["environment"]
    axes.set_title(f"{environment['processor']}, torch {environment['torch']}, {environment['date'][:10]}", fontsize=9)
    axes.legend()
    figure.savefig(path)


OURS = "#c1272d"
OTHERS = ("#0000a7", "#008176", "#eecc16", "#7f3c8d", "#3969ac", "#80ba5a", "#e68310", "#6b6b6b")


def draw_lengths(record: dict[str, Any], path: Path) -> None:
    """Time of forward and backward together over the length, and over ours, one line a candidate; written to `path`.

    The two kinds of `conv` become two rows. Where the cost per token should stay the same, a band shows what would
    count as such.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    kinds: dict[str, list[dict[str, Any]]] = {}
    for case in record["cases"]:
        kinds.setdefault(case.get("kind", ""), []).append(case)
    names = list(dict.fromkeys(found["candidate"] for case in record["cases"] for found in case["candidates"]))
    figure = Figure(figsize=(13, 0.6 + 4.8 * len(kinds)), layout="constrained", dpi=110)
    for axes, (kind, cases) in zip(figure.subplots(len(kinds), 2, squeeze=False), kinds.items(), strict=True):
        _draw_kind(axes, kind, cases, names, record["copy_bandwidth"], "per_token" in record)
        for one in axes:
            lengths = sorted({case["seqlen"] for case in cases})
            one.set_xscale("log", base=2)
            one.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45 if len(lengths) > 6 else 0)
            one.minorticks_off()
            one.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            one.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            one.yaxis.set_minor_formatter(NullFormatter())
            one.set_xlabel("rows" if record["command"] == "norm" else "sequence length")
            one.grid(True, which="both", axis="y", alpha=0.3, linewidth=0.6)
    where = record["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    tokens = "" if record["command"] == "norm" else f", {record['tokens']:,} tokens a case"
    title = f"{record['command']}, forward and backward: {where['device']}, {where['dtype']}{tokens}"
    figure.suptitle(f"{title}\n{versions}, {where['date'][:10]}", fontsize=10)
    figure.savefig(path)


def _draw_kind(axes, kind: str, cases: list[dict[str, Any]], names: list[str], bandwidth: float, linear: bool) -> None:
    left, right = axes
    left.set_yscale("log")
    right.set_yscale("log")
    floor, ours_times = [], []
    for place, name in enumerate(names):
        points = [
            (case["seqlen"], found)
            for case in cases
            for found in case["candidates"]
            if found["candidate"] == name and "seconds" in found
        ]
        if not points:
            continue
        ours = name == "ours"
        style = {"color": OURS, "linewidth": 2.6, "zorder": 5} if ours else {"color": OTHERS[(place - 1) % len(OTHERS)]}
        style |= {"marker": "o", "markersize": 5 if ours else 4, "label": textwrap.fill(name, 32)}
        left.plot([x for x, _ in points], [found["seconds"]["both"]["median"] * 1e3 for _, found in points], **style)
        relative = [(x, found["over_ours"]["both"]) for x, found in points if "over_ours" in found]
        right.plot([x for x, _ in relative], [ratio for _, ratio in relative], **style)
        if ours:
            ours_times = [found["seconds"]["both"]["median"] * 1e3 for _, found in points]
            floor = [(x, found["floor_bytes"]["both"] / bandwidth) for x, found in points if "floor_bytes" in found]
    if floor:
        times = [seconds * 1e3 for _, seconds in floor]
        left.plot([x for x, _ in floor], times, "k--", linewidth=1, label="floor: least traffic at copy speed")
    if linear and ours_times:
        label = f"constant: within {ALLOWED - 1:.0%}"
        left.axhspan(min(ours_times), min(ours_times) * ALLOWED, color=OURS, alpha=0.12, linewidth=0, label=label)
    low, high = right.get_ylim()
    right.set_ylim(min(low, 0.5), max(high, 2.2))
    low, high = left.get_ylim()
    middle = (low * high) ** 0.5
    left.set_ylim(min(low, middle / 2), max(high, middle * 2))  # small differences should look small
    left.set_ylabel("milliseconds (less is better)")
    right.set_ylabel("time over ours (above 1: ours is faster)")
    left.set_title(kind, fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    right.legend(handles, labels, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
