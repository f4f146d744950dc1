"""The picture of a comparison: validation losses by entry, and training losses over the steps."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matmix.train.comparison.results import EntryResult, spread

_SMOOTH = 0.05  # share of the records over which the curves of the training loss are averaged
_NAME_WIDTH = 26  # characters of a name on a line
_MARKERS = ("o", "s", "^", "D", "v", "P")
_MARKS = 8  # of a curve


def picture(results: Sequence[EntryResult]) -> bytes:
    """A PNG: on the left every seed and the mean, on the right the curves."""
    from matplotlib.figure import Figure  # only who draws needs it

    figure = Figure(figsize=(13, 1.8 + 0.34 * max(8, len(results))), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for place, result in enumerate(results):
        look = style(place)
        losses = spread(result.values("loss"))
        if losses is not None:
            left.errorbar(losses.mean, place, xerr=losses.deviation, capsize=4, linestyle="", **look)
            left.plot(result.values("loss"), [place] * losses.count, "|", markersize=9, color=look["color"])
        if curve := mean_curve(result):
            right.plot(*zip(*curve, strict=True), **line(place, len(results), len(curve), result.is_finished), **look)
            right.lines[-1].set_label(_wrapped(label(result)))
    left.set_yticks(range(len(results)), [_wrapped(result.entry.name) for result in results])
    left.set_ylim(len(results) - 0.5, -0.5)
    left.locator_params(axis="x", nbins=5)
    left.set_xlabel("validation loss (nats per token):\nmean, standard deviation, each seed")
    right.set_xlabel("step")
    right.set_ylabel("training loss (nats per token),\nrunning mean, over seeds")
    for axes in (left, right):
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.grid(True, alpha=0.3, linewidth=0.6)
    right.ticklabel_format(axis="y", style="plain", useOffset=False)
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize=8, ncols=2)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def style(place: int) -> dict[str, Any]:
    """Colour and marker by place: no two of the first 16 are alike."""
    from matplotlib import colormaps

    colours = colormaps["Dark2"].colors
    return {
        "color": colours[place % len(colours)],
        "marker": _MARKERS[(place + place // len(colours)) % len(_MARKERS)],
        "markersize": 5,
    }


def line(place: int, entries: int, points: int, finished: bool) -> dict[str, Any]:
    """How a curve is drawn: the later ones thinner and marked at other places, so that those below them are seen."""
    apart = max(1, points // _MARKS)
    return {
        "linewidth": 3.2 - 2.2 * place / max(1, entries - 1),
        "linestyle": "-" if finished else "--",
        "markevery": (round(apart * place / entries) % apart, apart),
    }


def label(result: EntryResult) -> str:
    """What the legend says; of runs that are not finished also how many are."""
    name = result.entry.name
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
