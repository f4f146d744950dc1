"""Pictures and tables of the study of MRU constructions, and the one JSON that its results are kept in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from matmix.kernels.benchmarks.measure import environment
from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, state_elements
from matmix.train.study_mru_measures import EVERY_64, FROM_1, LENGTH, ORDER
from matmix.train.study_mru_training import load_config

LIMIT = math.log(torch.finfo(torch.float32).max)
"""Log of float32's largest number."""

COLOURS = {
    "cayley": "#c1272d",
    "householder": "#0000a7",
    "ldu_newton_schulz": "#008176",
    "ldu": "#e68310",
    "qr": "#7f3c8d",
    "identity_plus": "#6b6b6b",
    "none": "#000000",
}
PARTS = ("growth", "train", "longer", "beyond", "long", "speed")


def report(results: Any, out: Path) -> None:
    """Gather what is there, draw it and print the tables. results: what `study_mru.Results` has."""
    found = {part: results.read(part) for part in PARTS}
    out.mkdir(parents=True, exist_ok=True)
    (out / "mru_study.json").write_text(json.dumps(record_of(found)) + "\n", encoding="utf-8")
    print(
        "\n\n".join(
            filter(
                None, (table_of_growth(found), table_of_training(found), table_of_longer(found), table_of_long(found))
            )
        )
    )
    for name, draw in (("growth", draw_growth), ("training", draw_training), ("beyond", draw_beyond)):
        if found["train" if name == "training" else name]:
            figure = draw(found)
            figure.savefig(out / f"mru_{name}.png")


def record_of(found: dict[str, Any]) -> dict[str, Any]:
    """What is committed: of the runs only every fifth step."""
    thinned = {
        part: {key: {**result, "steps": result["steps"][::5]} for key, result in found[part].items()}
        for part in ("train", "longer", "long")
    }
    return {"environment": environment(), **found, **thinned}


def table(columns: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])


def name_of(variant: str) -> str:
    construction, _, decay = variant.partition("+")
    return "no mixer" if construction == "none" else f"`{construction}`" + (" + decay" if decay else "")


def grown(curve: dict[str, Any]) -> str:
    """The overflow, or what the mean log-norm became."""
    if curve["overflow"] is not None:
        return f"overflow at token {curve['overflow']:,}"
    return f"{curve['mean'][-1]:.2f}"


def table_of_growth(found: dict[str, Any]) -> str:
    """Norms along random tokens, and time."""
    rows = []
    cayley = found["speed"].get("cayley", {}).get("together_ms", math.nan)
    for variant, curves in found["growth"].items():
        construction = variant.partition("+")[0]
        speed = found["speed"].get(variant)
        rows.append(
            [
                name_of(variant),
                "yes" if construction in BOUNDED_CONSTRUCTIONS else "no",
                str(state_elements(construction, ORDER)),
                *(grown(curve) for curve in curves.values()),
                f"{speed['together_ms']:,.0f} ({speed['together_ms'] / cayley:.2f})" if speed else "",
            ]
        )
    stds = next(iter(found["growth"].values()), {})
    columns = ["construction", "bounded", f"elements, order {ORDER}", *(f"weights {std}" for std in stds)]
    return table([*columns, "ms, forward + backward (x cayley)"], rows) if rows else ""


def table_of_training(found: dict[str, Any]) -> str:
    """What equal tokens gave, and what the trained states do beyond the length of training."""
    rows = []
    for key, result in found["train"].items():
        variant, _, rate = key.partition("@")
        loss, beyond = result["validation_loss"], found["beyond"].get(key)
        norms = [step["log_norm_max"] for step in result["steps"] if step["log_norm_max"] is not None]
        outcome = f"{loss:.3f}" if loss is not None else "NaN"
        nan = "none" if result["first_nan"] is None else f"step {result['first_nan']}"
        if result["skipped"] and result["stopped"] is None:
            nan += f" ({result['skipped']} skipped)"
        rows.append([name_of(variant), rate, outcome, nan, f"{max(norms):.1f}" if norms else "", *beyond_cells(beyond)])
    columns = ["construction", "learning rate", "validation loss", "first NaN", "largest log-norm while training"]
    columns += [f"mean log-norm at token {LENGTH:,}, by layer", "loss of their last quarter"]
    return table(columns, rows) if rows else ""


def table_of_longer(found: dict[str, Any]) -> str:
    """What the bounded ones learn with more tokens."""
    rows = [
        [name_of(key.partition("@")[0]), f"{result['tokens']:,}", f"{result['validation_loss']:.3f}"]
        for key, result in found["longer"].items()
    ]
    return table(["construction", "tokens", "validation loss"], rows) if rows else ""


def beyond_cells(beyond: dict[str, Any] | None) -> list[str]:
    if beyond is None:
        return ["", ""]
    if overflows(beyond["layers"]):
        return [f"NaN from token {min(overflows(beyond['layers'])):,}", "NaN"]
    last = [layer["mean"][-1] for layer in beyond["layers"]]
    return [f"{min(last):.1f} to {max(last):.1f}", f"{beyond['loss']['last_2048']:.3f}"]


def table_of_long(found: dict[str, Any]) -> str:
    """Training at 8,192 tokens."""
    rows = []
    for variant, result in found["long"].items():
        steps = [step for step in result["steps"] if step["log_norm_max"] is not None]
        nan = "none" if result["first_nan"] is None else f"step {result['first_nan']}"
        norms = f"{steps[0]['log_norm_max']:.3f} to {max(step['log_norm_max'] for step in steps):.3f}"
        losses = f"{steps[0]['loss']:.2f} to {steps[-1]['loss']:.2f}"
        rows.append([name_of(variant), str(len(result["steps"])), losses, norms, nan])
    columns = ["construction", "steps", "training loss", "largest log-norm, first step to largest", "first NaN"]
    return table(columns, rows) if rows else ""


def new_figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # only who draws needs it

    figure = Figure(figsize=(10, 4.6), layout="constrained", dpi=110)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for one in axes:
        one.grid(True, alpha=0.3, linewidth=0.6)
    return figure, axes


def style(variant: str) -> dict[str, Any]:
    construction, _, decay = variant.partition("+")
    # Dashed, for the orthogonal ones lie upon each other.
    line = ":" if decay else "--" if construction == "householder" else "-"
    return {"color": COLOURS[construction], "linestyle": line, "linewidth": 1.8}


def limits(axes: Any, unit: str) -> None:
    """An axis of log-norms, where float32 ends, and where squares of its numbers do."""
    for height, text in ((LIMIT, "float32 ends"), (LIMIT / 2, "squares overflow: loss NaN")):
        axes.axhline(height, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(text, (0.01, height), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    axes.set_ylabel(f"log-norm of the states, {unit} (nats)")


def drawn_to_the_limit(tokens: tuple[int, ...], values: list[float | None]) -> tuple[list[int], list[float]]:
    """A curve up to its overflow, where it leaves the picture."""
    end = values.index(None) if None in values else len(values)
    points = [*zip(tokens[:end], values[:end], strict=True)]
    if end < len(values):
        points.append((tokens[end], LIMIT))
    return [token for token, _ in points], [value for _, value in points]


def draw_growth(found: dict[str, Any]) -> Any:
    """Along random tokens, one panel for each size of the weights but 0."""
    stds = [std for std in next(iter(found["growth"].values())) if std != "0"]
    figure, axes = new_figure(len(stds))
    for one, std in zip(axes, stds, strict=True):
        for variant, curves in found["growth"].items():
            if "+" not in variant:
                one.plot(*drawn_to_the_limit(FROM_1, curves[std]["mean"]), label=variant, **style(variant))
        limits(one, "mean")
        one.set_xscale("log", base=2)
        one.set_xlim(1, LENGTH)
        one.set_ylim(-LIMIT - 5, LIMIT + 10)
        ticks = [1, 8, 64, 512, LENGTH]
        one.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        one.set_xlabel("position (tokens)")
        one.set_title(f"untrained layer, weights of standard deviation {std}", fontsize=10)
    axes[0].legend(fontsize=8)
    return figure


def draw_training(found: dict[str, Any]) -> Any:
    """Loss and largest log-norm over the steps of the quickstart, at its learning rate."""
    rate = f"{load_config('mru_shakespeare').optimizer.lr:g}"
    figure, (left, right) = new_figure(2)
    for key, result in found["train"].items():
        variant, _, at = key.partition("@")
        if at != rate:
            continue
        finite = [step for step in result["steps"] if step["loss"] is not None]
        steps = [step["step"] for step in finite]
        label = name_of(variant).replace("`", "")
        if result["first_nan"] is not None:
            label += f", NaN at step {result['first_nan']}"
        left.plot(steps, smooth([step["loss"] for step in finite]), label=label, **style(variant))
        if variant != "none":
            right.plot(steps, [step["log_norm_max"] for step in finite], label=label, **style(variant))
        if result["stopped"] is not None:
            last = finite[-1]
            left.plot(last["step"], last["loss"], "x", color=COLOURS[variant.partition("+")[0]], markersize=9)
            right.plot([last["step"], last["step"] + 1], [last["log_norm_max"], LIMIT], marker="x", **style(variant))
    left.set_ylabel("training loss, mean of 10 steps (nats per token)")
    limits(right, "largest")
    right.set_xscale("log")
    for one in (left, right):
        one.set_xlabel(f"step at learning rate {rate} (2,048 tokens each)")
    left.legend(fontsize=8)
    return figure


def smooth(values: list[float], window: int = 10) -> list[float]:
    """Means of the last `window` values."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]


def draw_beyond(found: dict[str, Any]) -> Any:
    """Trained models, each at the highest learning rate that it survived, along 8,192 tokens: of the layer with the
    largest state in the end, the largest and the mean over heads."""
    figure, axes = new_figure(2)
    drawn = set()
    for key, result in found["beyond"].items():
        variant, _, rate = key.partition("@")
        if variant in drawn:
            continue
        drawn.add(variant)
        layers = result["layers"]
        # Up to the first NaN of any layer: the layers above it have it from there.
        end = min(len(drawn_to_the_limit(EVERY_64, layer["largest"])[0]) for layer in layers) - 1
        worst = max(layers, key=lambda layer: layer["largest"][end - 1])
        for one, name in zip(axes, ("largest", "mean"), strict=True):
            values = [*worst[name][:end], *([None] * (len(EVERY_64) - end))] if overflows(layers) else worst[name]
            label = f"{name_of(variant).replace('`', '')}, learning rate {rate}"
            one.plot(*drawn_to_the_limit(EVERY_64, values), label=label, **style(variant))
    for one, name in zip(axes, ("largest head", "mean of the heads"), strict=True):
        limits(one, name)
        one.axvline(128, color="black", linewidth=0.8, linestyle=":")
        one.set_xlim(0, LENGTH)
        one.set_xlabel("position (tokens); dotted: the length of training")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def overflows(layers: list[dict[str, Any]]) -> list[int]:
    """Tokens at which layers have their first state that is not finite."""
    return [layer["overflow"] for layer in layers if layer["overflow"] is not None]
