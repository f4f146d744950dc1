"""The picture of a comparison, a row of panels for each variant: how good each entry became, training losses over the
steps, and losses by the position in the document.

Of generated tasks the first panel has the accuracy over lengths; otherwise it has the validation losses.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from matmix.launch.figures import panels, png_of
from matmix.launch.lab.compare.controls import Control
from matmix.launch.lab.compare.results import EntryResult, accuracy_metrics, position_metrics
from matmix.launch.many.spread import spread

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
    """Of the loss."""
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
    """What the legend says; of runs that are not finished also how many are."""
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
