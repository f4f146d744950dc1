"""The study's pictures: losses by variant, curves of a few, growth of norms, and losses beyond the training length."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from matmix.launch.figures import panels, png_of
from matmix.studies.mru.grid import PART, Grid, Result
from matmix.studies.mru.growth import BIN
from matmix.studies.mru.runs import CURVE
from matmix.studies.mru.variants import ATTENTION, NONE

LIMIT = math.log(torch.finfo(torch.float32).max)
"""Log of float32's largest number."""

COLOURS = {
    "affine": "#c1272d", "identity_plus": "#e68310", "ldu": "#0000a7", "cayley": "#008176", "householder": "#7f3c8d",
    "qr": "#3a9bdc", "ldu_newton_schulz": "#a5682a", ATTENTION: "#000000", NONE: "#8c8c8c",
}  # fmt: skip
DRAWN: dict[str, str] = {
    "affine, chunked, gate and shift": "-",
    "affine, chunked": "--",
    "identity_plus, chunked": "-",
    "identity_plus, chunked, elements x 10": "--",
    "ldu, dense, rule": "-",
    "cayley, dense, rule": "-",
    ATTENTION: "-",
    NONE: "-",
}
"""Variants whose curves are drawn -> style of the line."""


def pictures(parts: dict[str, dict[str, Result]]) -> dict[str, bytes]:
    """Returns the PNG of each picture for which there are results, by name. parts: part -> results by key."""
    grid = Grid(parts[PART])
    draws: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "losses": (draw_losses, grid), "training": (draw_training, grid),
        "growth": (draw_growth, parts["growth"]), "beyond": (draw_beyond, parts["beyond"]),
    }  # fmt: skip
    return {name: png_of(draw(shown)) for name, (draw, shown) in draws.items() if getattr(shown, "results", shown)}


def _colour(variant: str) -> str:
    return COLOURS.get(variant.partition(",")[0], "#555555")


def _style(variant: str) -> dict[str, Any]:
    return {"color": _colour(variant), "linestyle": DRAWN.get(variant, "-"), "linewidth": 1.8, "label": variant}


def draw_losses(grid: Grid) -> Any:
    """Draws every seed of every variant at its best rate, a panel for each dataset; variants as the first one ranks
    them."""
    order = list(dict.fromkeys(variant for name in grid.datasets for variant in grid.ranked(name)))
    figure, (axes,) = panels((11, 1.6 + 0.24 * len(order)), 1, len(grid.datasets), sharey=True)
    for one, name in zip(axes, grid.datasets, strict=True):
        for place, variant in enumerate(order):
            run = grid.best.get((name, variant))
            losses = [loss for loss in grid.seeds(run) if math.isfinite(loss)] if run else []
            marker = "o" if "," in variant else "D"
            one.plot(losses, [place] * len(losses), linestyle="-", marker=marker, markersize=6, color=_colour(variant))
            if not losses:
                one.annotate("NaN", (0.98, place), xycoords=("axes fraction", "data"), ha="right", va="center")
        for control, line in ((NONE, ":"), (ATTENTION, "--")):
            if (run := grid.best.get((name, control))) is not None:
                mean = fmean(filter(math.isfinite, grid.seeds(run)))
                one.axvline(mean, color="black", linewidth=1, linestyle=line, label=control)
        one.set(title=name, xlabel="validation loss, each seed (nats per token)")
    drawn = {line.get_label(): line for one in axes for line in one.get_lines()}
    if lines := [drawn[control] for control in (NONE, ATTENTION) if control in drawn]:
        figure.legend(handles=lines, fontsize=9, loc="outside lower center", ncols=2)
    axes[0].set_yticks(range(len(order)), order, fontsize=9)
    axes[0].set_ylim(len(order) - 0.5, -0.5)
    return figure


def draw_training(grid: Grid) -> Any:
    """Draws training losses of a few variants at their best rates."""
    figure, (axes,) = panels((11, 5.8), 1, len(grid.datasets))
    for one, name in zip(axes, grid.datasets, strict=True):
        shown: list[float] = []
        for variant, run in ((variant, grid.best[name, variant]) for variant in DRAWN if (name, variant) in grid.best):
            values = run["curve"]
            steps = [min(CURVE * (place + 1), run["steps"]) for place in range(len(values))]
            one.plot(steps, values, **{**_style(variant), "label": f"{variant} ({run['rate']:g})"})
            shown += [value for value in values[len(values) // 8 :] if value is not None]
        if shown:  # the first steps are alike, and far above
            one.set_ylim(min(shown) - 0.05, max(shown) + 0.05)
        one.set(title=name, xlabel="step", ylabel=f"training loss, mean of {CURVE} steps (nats per token)")
        if one.has_data():
            title = {"title": "variant (best learning rate)", "title_fontsize": 8}
            one.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, **title)
    return figure


def _limits(axes: Any, what: str) -> None:
    """Draws an axis of log-norms, where float32 ends, and where squares of its numbers do."""
    for height, text in ((LIMIT, "float32 ends"), (LIMIT / 2, "squares overflow: loss NaN")):
        axes.axhline(height, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(text, (0.01, height), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    axes.set_ylabel(f"{what} (nats)")


def _to_the_limit(tokens: list[int], values: list[float | None]) -> tuple[list[int], list[float]]:
    """Returns a curve up to its overflow, where it leaves the picture."""
    end = values.index(None) if None in values else len(values)
    return tokens[: end + 1], [*values[:end], LIMIT][: len(values)]


def draw_growth(results: dict[str, Result]) -> Any:
    """Draws along random tokens, a panel for each size of the elements but 0."""
    first = next(iter(results.values()))
    stds, last = [std for std in first["sizes"] if std != "0"], first["tokens"][-1]
    ticks = [tick for tick in (1, 8, 64, 512, 8192) if tick <= last]
    figure, (axes,) = panels((11, 5.2), 1, len(stds), sharey=True)
    for one, std in zip(axes, stds, strict=True):
        for name, result in results.items():
            construction, _, form = name.partition(", ")
            line = {"color": COLOURS[construction], "linestyle": "--" if form == "chunked" else "-", "linewidth": 1.8}
            one.plot(*_to_the_limit(result["tokens"], result["sizes"][std]["mean"]), label=name, **line)
        _limits(one, "mean log-norm of the states")
        one.label_outer()
        one.set_xscale("log", base=2)
        one.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        one.set(xlim=(1, last), xlabel="position (tokens)")
        one.set_ylim(top=LIMIT + 10)
        one.set_title(f"untrained layer, elements of std {std}", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    return figure


def draw_beyond(results: dict[str, Result]) -> Any:
    """Draws losses and largest log-norms of a few trained models along texts far longer than their training's."""
    figure, ((left, right),) = panels((11, 5.2), 1, 2)
    by_variant = {result["variant"]: result for result in results.values()}
    for variant, result in ((variant, by_variant[variant]) for variant in DRAWN if variant in by_variant):
        left.plot([token - BIN / 2 for token in result["tokens"]], result["loss"], **_style(variant))
        if result["log_norm_max"]:
            right.plot(*_to_the_limit(result["tokens"], result["log_norm_max"]), **_style(variant))
    left.set_ylabel(f"loss, mean of {BIN} tokens (nats per token)")
    _limits(right, "largest log-norm of any state")
    for one in (left, right):
        one.axvline(64, color="black", linewidth=0.8, linestyle=":")
        one.set_xlabel("position (tokens); dotted: the length of training")
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    return figure
