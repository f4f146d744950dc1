"""The picture of a ladder: losses over the parameters with the laws fitted to them, and the gaps to each control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from matmix.launch.figures import panels, png_of
from matmix.launch.lab.compare.report import Part, looks
from matmix.launch.lab.ladder.law import SHARE
from matmix.launch.lab.ladder.results import Family, Gap
from matmix.launch.lab.ladder.sizes import Ladder
from matmix.launch.many.scores import spread

_FURTHER = 3
"""The curves go on to so many times the largest size."""
_POINTS = 60


def picture(ladder: Ladder, parts: Sequence[Part], families: Sequence[Family], gaps: Sequence[Gap]) -> bytes:
    """Draws them beside each other; returns a PNG."""
    controls = list(dict.fromkeys(gap.control.name for gap in gaps))
    names = [family.name for family in families]
    drawn = {
        result.entry.name: {**look, "linewidth": 1.6}
        for result, look in zip(parts[-1].results, looks(parts[-1], names), strict=True)
    }
    figure, grid = panels((6.0 + 4.6 * len(controls), 4.8), 1, 1 + len(controls))
    unit = ladder.comparison.entries[0].config.task().loss_metric.unit
    counts = ladder.settings.counts
    _draw_losses(grid[0, 0], families, drawn, max(counts.values()), unit)
    for axes, control in zip(grid[0, 1:], controls, strict=True):
        _draw_gaps(axes, [gap for gap in gaps if gap.control.name == control], drawn, control)
    for axes in grid[0]:
        axes.set(xscale="log", xlabel="N, parameters without embeddings")
        axes.set_xticks(list(counts.values()), list(counts))
        axes.set_xticks([], minor=True)
    return png_of(figure)


def _draw_losses(axes: Any, families: Sequence[Family], looks: dict[str, Any], largest: int, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    for family in families:
        look = looks[family.name]
        means = {
            rung.parameters: over for rung in family.rungs.values() if (over := spread(list(rung.losses.values())))
        }
        if not means:
            continue
        heights, errors = [one.mean for one in means.values()], [one.deviation or 0.0 for one in means.values()]
        points = {**look, "linestyle": "" if family.fit else ":"}
        axes.errorbar(list(means), heights, yerr=errors, capsize=3, label=family.entry.label, **points)
        if (fit := family.fit) is not None:
            places = np.geomspace(min(means), _FURTHER * largest, _POINTS)
            lows, highs = zip(*(fit.band(place) for place in places), strict=True)
            line = {"color": look["color"], "linestyle": look["linestyle"]}
            axes.plot(places, [fit.loss(place) for place in places], linewidth=1.2, **line)
            axes.fill_between(places, lows, highs, color=look["color"], alpha=0.15, linewidth=0)
    axes.set(yscale="log", title=f"E + A N$^{{-a}}$, with {100 * SHARE:.0f} % of its draws")
    axes.set_ylabel(f"validation loss ({unit}): mean, standard deviation")
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.yaxis.set_major_formatter("{x:.2f}")
    axes.yaxis.set_minor_locator(NullLocator())
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _draw_gaps(axes: Any, gaps: Sequence[Gap], looks: dict[str, Any], control: str) -> None:
    for gap in gaps:
        overs = {gap.parameters[size]: over for size, values in gap.differences.items() if (over := spread(values))}
        if overs:
            heights, errors = [one.mean for one in overs.values()], [one.deviation or 0.0 for one in overs.values()]
            axes.errorbar(list(overs), heights, yerr=errors, capsize=3, label=gap.entry.name, **looks[gap.entry.name])
    axes.axhline(0, color="0.5", linewidth=1, linestyle=":")
    axes.set_title(f"gain over {control}")
    axes.set_ylabel("nats: mean, standard deviation")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
