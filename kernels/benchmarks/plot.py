"""Draws a record of the benchmarks: how many times our time and memory each peer takes (needs the [bench] extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
